"""Tools, one file each: the arguments of a call and a Workspace go in, a Result comes out.

Start with ``tool.py`` and ``write_file.py``; a new one is a class and an entry in ``api.TOOLS``.
"""
