"""Exports of trained models in standard formats: one module for each format.

The package is not called `export`, because importing it would then replace `coterie.export`.
"""

from coterie.exports.exporting import Exported as Exported
from coterie.exports.exporting import export as export
