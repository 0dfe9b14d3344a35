"""What the machine's paths carry: `python -P -m deepex.study.transfer` on some ranks, or `measure` on a communicator."""
