"""An HTTP endpoint in OpenAI's form: a request goes in, sampled tokens are kept, a message comes
out.

Start with ``endpoint.py`` and ``session.py``.
"""
