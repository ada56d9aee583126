"""A language server that offers a served model's suggestions to editors, and reports what became of
them.
"""
