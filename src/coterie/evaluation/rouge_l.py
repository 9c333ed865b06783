"""ROUGE-L: how many words a generated answer has in common with the right one, in their order."""

from collections.abc import Sequence

from coterie.data.measured import Measured
from coterie.errors import CoterieError
from coterie.evaluation.metrics import Metric


class RougeL(Metric):
    """The F1 of the longest common subsequence of words.

    Lin, "ROUGE: A Package for Automatic Evaluation of Summaries" (2004), without stemming and with
    words in any script (`UnicodeTokenizer`).
    """

    name = "rouge_l"
    title = "ROUGE-L"
    needs = "answers"

    def score(self, measured: Measured) -> Sequence[float | None]:
        """Return the score of each answer."""
        try:
            from rouge_score.rouge_scorer import RougeScorer

            from coterie.evaluation.words import UnicodeTokenizer
        except ModuleNotFoundError as error:
            raise CoterieError(
                f"Rouge-L needs {error.name}; install it with pip install rouge-score."
            ) from None
        scorer = RougeScorer(["rougeL"], tokenizer=UnicodeTokenizer())
        pairs = zip(measured.answers, measured.texts, strict=True)
        return [scorer.score(right, text)["rougeL"].fmeasure for right, text in pairs]
