"""Tinker's API on the engine and the learner, for the published client ``tinker``.

wire        protocol buffers, as the client sends and reads them
losses      the losses that the client names
adapters    an adapter in training; many of them in one batch
history     every request and its result on disk
trainer     carries requests out in the order of their numbers, those of several adapters together
sampler     samples from saved adapters, all in one batch of the engine
routes      the paths of the API
"""
