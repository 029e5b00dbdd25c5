"""Mutants: faults sown into the code one at a time, to see whether the simulators and the tests catch them."""
