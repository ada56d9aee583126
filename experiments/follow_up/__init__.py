"""The classifier of dissatisfied follow-up messages, judged on families of messages that it never
saw.
"""
