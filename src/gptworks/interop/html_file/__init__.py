"""Export a run as one HTML file, in which the model computes: no server, no network."""

from gptworks.interop.html_file.exporting import Export, export_html

__all__ = ["Export", "export_html"]
