"""Starts ranks: environment, rendezvous, start-up checks and parallel groups."""
