"""Many clients against ``launch.realtime`` while its parts are killed, and the audit of what is
left.
"""
