"""Products of rows with the matrix of their group, as a mixture of experts needs them."""
