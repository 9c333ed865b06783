"""ROUGE-L: the longest common subsequence of a generated answer and the right answer."""

from collections.abc import Sequence

from coterie.data.measured import Measured
from coterie.errors import CoterieError
from coterie.evaluation.metrics import Metric


class RougeL(Metric):
    """The F1 score of the longest common subsequence of words.

    The metric is from C.-Y. Lin, "ROUGE: A Package for Automatic Evaluation of Summaries" (2004).
    Words are not stemmed. Words of any script are supported; see `UnicodeTokenizer`.
    """

    name = "rouge_l"
    title = "ROUGE-L"
    needs = "answers"

    def score(self, measured: Measured) -> Sequence[float | None]:
        try:
            from rouge_score.rouge_scorer import RougeScorer

            from coterie.evaluation.words import UnicodeTokenizer
        except ModuleNotFoundError as error:
            raise CoterieError(
                f"ROUGE-L needs the package {error.name}; run `pip install rouge-score`."
            ) from None
        scorer = RougeScorer(["rougeL"], tokenizer=UnicodeTokenizer())
        pairs = zip(measured.answers, measured.texts, strict=True)
        return [scorer.score(right, text)["rougeL"].fmeasure for right, text in pairs]
