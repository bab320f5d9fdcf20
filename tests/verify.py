"""Verifies deliveries with the public libraries that consumers use: standardwebhooks and cloudevents, from PyPI.

Reads one JSON object from the file that it is given: what a sink was sent, and what it must find in it. Ends with a traceback at the
first delivery that does not verify, or does not say what it must.
"""

import base64
import json
import sys

from cloudevents.core.bindings.http import HTTPMessage, from_http
from cloudevents.core.formats.json import JSONFormat
from standardwebhooks import Webhook, WebhookVerificationError


def verify(case, delivery):
    headers, body = delivery["headers"], base64.b64decode(delivery["body"])
    for secret in case["secrets"]:
        Webhook(secret).verify(body, headers, json_parse=False)
    for wrong_secret, wrong_body in [(case["stranger"], body), (case["secrets"][0], body + b" ")]:
        try:
            Webhook(wrong_secret).verify(wrong_body, headers, json_parse=False)
        except WebhookVerificationError:
            continue
        raise AssertionError("a signature verifies that must not")
    assert headers["webhook-id"] == delivery["id"]
    if delivery["format"] == "StandardWebhooks":
        assert body == delivery["message"].encode()
        assert headers["content-type"] == "application/json"
        return
    read_event(case, delivery, headers, body)


def read_event(case, delivery, headers, body):
    structured = delivery["format"] == "CloudEventsStructured"
    assert any(name.startswith("ce-") for name in headers) == (not structured)
    event = from_http(HTTPMessage(headers, body), JSONFormat())
    assert event.get_specversion() == "1.0"
    assert event.get_id() == delivery["id"]
    assert event.get_source() == case["source"]
    assert event.get_type() == delivery["type"], event.get_type()
    assert event.get_time().isoformat() == "2026-11-30T01:02:03.456789+00:00"
    assert event.get_datacontenttype() == "application/json"
    assert event.get_extension("tenant") == delivery["tenant"]
    assert event.get_extension("operation") == case["operation"]
    assert event.get_extension("idempotencykey") == delivery["key"]
    assert event.get_data() == json.loads(delivery["data"]), event.get_data()
    # Its bytes, too: as they stand in the message.
    if structured:
        assert headers["content-type"] == "application/cloudevents+json"
        assert delivery["data"].encode() in body
    else:
        assert delivery["data"].encode() == body


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        case = json.load(file)
    for delivery in case["deliveries"]:
        verify(case, delivery)
    print("verified", len(case["deliveries"]))


if __name__ == "__main__":
    main()
