"""Bytes between identities. Knows neither messages nor machines."""
