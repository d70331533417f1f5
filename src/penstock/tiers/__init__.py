"""Where blocks lie: slots and addresses, no policy."""
