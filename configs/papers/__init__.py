"""Papers that are reproduced here: ``table.toml`` has a row for each, with its commands.

``python -m launch.papers`` prints the table and runs what is missing. A config that exists for a
paper alone is a file of this folder; other rows name a config of the folder above.
"""
