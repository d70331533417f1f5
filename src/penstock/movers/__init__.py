"""How bytes travel between two media, no policy."""
