"""The server in front of the engine: requests in OpenAI's form go in, answers and their record
come out.

Start with ``fleet.py`` (versions of the weights behind one door) and ``service.py`` (one version).
``rl_code/harness/endpoint/`` has the HTTP and the form of messages, which agents of others use,
too.
"""
