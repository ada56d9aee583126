"""Lines of texts, and Python source that may be broken or hostile."""
