"""Statistics and events for people and for other programs."""
