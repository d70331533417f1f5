"""Translations between Penstock and the engines of others: they translate, never decide."""
