"""The loss when people differ from the simulator that a policy was trained on."""
