"""The HTML page of a report, an extra: report/renderer.py imports it when a report is first drawn."""
