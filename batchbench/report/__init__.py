"""A report on results: one content, written as HTML, PDF or Markdown."""
