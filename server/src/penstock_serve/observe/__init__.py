"""Statistics and events for people and for other programs.

Public: `metrics`, where a new metric is added, and the values of `live`.
"""
