"""Clients of shared stores: Redis and Valkey, Mooncake Store, object stores, folders.

Public: `blobs`, what a client does; each client is loaded when a tier is opened on it.
"""
