"""How well recorded decisions of programmers can be predicted."""
