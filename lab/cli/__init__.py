"""The commands of `lab`, one a module."""
