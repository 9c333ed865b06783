"""The four papers' tables, figures and claims: `python -m reproduce TABLE.yaml`, in papers/."""
