"""The report of a run: one page without network, and the table that the console shows too."""

from pippin.report.page import write_report
from pippin.report.table import COLUMNS, answers_table, summary_table

__all__ = ["COLUMNS", "answers_table", "summary_table", "write_report"]
