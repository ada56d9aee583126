"""Attention of few tokens to pages of latent vectors, as kernels and as plain jnp."""
