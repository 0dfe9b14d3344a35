"""One self-contained HTML file from any number of runs and studies. No torch, no MPI."""
