"""Compatibility veneer: the documented functions. Exceptions become a bool and a log line here and only here."""
