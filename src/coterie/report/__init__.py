"""The HTML report: figures of runs, and the page that contains them."""
