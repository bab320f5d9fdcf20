"""Reads pages of metrics with the official parser: prometheus_client, from PyPI.

Takes pairs of a format, `text` or `openmetrics`, and a file. Writes for each page, as one line of JSON, its families by name: type, help,
and samples by name and labels. Ends with a traceback where a page is not what its format says.
"""

import json
import sys

from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as text


def read(form, page):
    families = {}
    for family in {"text": text, "openmetrics": openmetrics}[form](page):
        assert family.name not in families, f"{family.name} comes twice"
        assert family.type not in ("unknown", "untyped"), f"{family.name} has no type"
        assert family.documentation, f"{family.name} has no help"
        samples = {}
        for sample in family.samples:
            key = json.dumps([sample.name, sorted(sample.labels.items())])
            assert key not in samples, f"{key} comes twice"
            samples[key] = sample.value
        families[family.name] = {"type": family.type, "help": family.documentation, "samples": samples}
    return families


def main():
    arguments = sys.argv[1:]
    for form, path in zip(arguments[::2], arguments[1::2]):
        with open(path, encoding="utf-8") as file:
            print(json.dumps(read(form, file.read())))


if __name__ == "__main__":
    main()
