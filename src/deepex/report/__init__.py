"""One self-contained HTML file from any number of runs and studies. No torch, no MPI.

report = make_report([Path("studies/strong"), Path("runs/a")])
report.html, report.runs, report.problems
"""

from deepex.report.build import Report, make_report

__all__ = ["Report", "make_report"]
