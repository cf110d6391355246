"""Export a run as one HTML file, in which the model computes without a server or a network, or as a folder for a static
host."""

from gptworks.interop.html_file.exporting import Export, export_html

__all__ = ["Export", "export_html"]
