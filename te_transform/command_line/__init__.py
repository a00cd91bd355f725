"""The command line, an extra: `te-transform`, or `python -m te_transform`."""
