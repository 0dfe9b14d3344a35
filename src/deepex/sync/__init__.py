"""When (`when`) and how (`how`, `outer`, `wire`) replicas agree, and where they meet (`meeting`)."""
