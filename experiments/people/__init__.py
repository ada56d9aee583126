"""A study of how well recorded decisions of programmers can be predicted."""
