"""The parties of a handoff with everything around them, for explorer and simulator."""
