"""What is learnt: the loss that is minimised, and the measures that a person reads."""
