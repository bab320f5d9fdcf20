//! What events are made of an answer, and what becomes of templates that fail.

use std::time::Duration;

use http::StatusCode;
use serde_json::{Value as Json, json};

use super::*;
use crate::record::{Key, Spelling, Tenant};

const RECORD: Uuid = Uuid::from_u128(7);

fn spec(kind: &str) -> Spec {
    Spec { kind: kind.to_owned(), ..Spec::default() }
}

fn compile(specs: &[Spec]) -> Result<Templates, Vec<String>> {
    let sinks = ["main", "audit"].map(|sink| Subscriber {
        sink: sink.to_owned(),
        events: subscription::TypeFilter::default(),
    });
    Templates::compile(&Operation::parse("orders.create").unwrap(), specs, &sinks, 2000)
}

fn context_of(templates: &Templates, body: &str) -> Option<Context> {
    let mut headers = HeaderMap::new();
    headers.insert("x-shop", "berlin".parse().unwrap());
    let request = RequestParts {
        method: &Method::POST,
        target: "/accounts/7/orders?dry=1&dry=2",
        headers: &headers,
        params: &[("account", "7")],
        body: body.as_bytes(),
    };
    templates.context(&request, 1000)
}

/// The events that another process writes, which knows what was kept.
fn render(specs: &[Spec], request: &str, status: u16, response: &str) -> Rendered {
    let templates = compile(specs).unwrap();
    let context = context_of(&templates, request).map(|context| context.kept);
    render_with(&templates, context.as_ref(), status, response)
}

fn render_with(
    templates: &Templates,
    context: Option<&Bytes>,
    status: u16,
    response: &str,
) -> Rendered {
    let body = KeptBody::Whole(Bytes::copy_from_slice(response.as_bytes()));
    let status = StatusCode::from_u16(status).unwrap();
    templates.render(&Origin {
        record: RECORD.into(),
        scope: &Scope {
            tenant: Tenant::parse("acme").unwrap(),
            operation: Operation::parse("orders.create").unwrap(),
            key: Key::parse("k 1").unwrap(),
        },
        attempt: Attempt::FIRST,
        at: SystemTime::UNIX_EPOCH + Duration::from_millis(1500),
        context: context.map(|context| &**context),
        answer: &Answer { status, headers: HeaderMap::new(), spelling: Spelling::default(), body },
    })
}

fn data(event: &Event) -> Json {
    serde_json::from_slice::<Json>(&event.payload).unwrap()["data"].clone()
}

#[test]
fn the_default_event_embeds_the_response_as_it_came() {
    let rendered = render(&[], "", 201, "{\"b\": 1.10, \"a\":9007199254740993000000}");
    let event = rendered.events.first().unwrap();
    let expected = format!(
        concat!(
            r#"{{"type":"orders.create","timestamp":"1970-01-01T00:00:01.500000Z","#,
            r#""data":{{"status":201,"response":{{"b": 1.10, "a":9007199254740993000000}}}},"#,
            r#""tenant":"acme","operation":"orders.create","idempotency_key":"k 1","id":"{}"}}"#
        ),
        event.id
    );
    assert_eq!(std::str::from_utf8(&event.payload).unwrap(), expected);
    assert_eq!(event.key, format!("{RECORD}/orders.create"));
    assert_eq!(event.sinks, ["main", "audit"]);
    assert_eq!(event.id, Uuid::new_v5(&NAMESPACE, event.key.as_bytes()));
    assert!(render(&[], "", 422, "{}").events.is_empty());
    let text = render(&[], "", 200, "not json");
    assert_eq!(data(&text.events[0]), json!({"status": 200, "response": null}));
}

#[test]
fn leaves_keep_their_types_and_when_decides() {
    let payload = json!({
        "amount": "{{ request.json.amount }}",
        "big": "{{ response.json.id }}",
        "list": ["{{ response.json.items }}", 1, true, null, "plain"],
        "text": "{{ tenant }}/{{ operation }}/{{ key }}",
        "from": "{{ request.method }} {{ request.path }} {{ request.query.dry }}",
        "shop": "{{ request.headers['x-shop'] }}{{ request.params.account }}",
        "record": "{{ record }}",
    });
    let created = Spec {
        when: Some("response.status == 201".to_owned()),
        payload: Some(payload),
        sinks: Some(vec!["audit".to_owned()]),
        ordering_key: Some("{{ request.params.account }}".to_owned()),
        ..spec("order.created")
    };
    let specs = [created, spec("audit.order")];
    let response = r#"{"id":18446744073709551615,"items":[{"n":1}]}"#;
    let rendered = render(&specs, r#"{"amount":12.5,"other":"secret"}"#, 201, response);
    assert_eq!(rendered.failed, 0, "{:?}", rendered.events);
    let event = rendered.events.first().unwrap();
    assert_eq!(
        data(event),
        json!({
            "amount": 12.5,
            "big": u64::MAX,
            "list": [[{"n": 1}], 1, true, null, "plain"],
            "text": "acme/orders.create/k 1",
            "from": "POST /accounts/7/orders 1",
            "shop": "berlin7",
            "record": RECORD.to_string(),
        })
    );
    assert_eq!(event.sinks, ["audit"]);
    assert_eq!(event.ordering_key.as_deref(), Some("7"));
    let positions = rendered.events.iter().map(|event| event.position).collect::<Vec<_>>();
    assert_eq!(positions, [0, 1]);
    let refused = render(&specs, "{}", 422, "{}");
    let kinds = refused.events.iter().map(|event| event.kind.as_str()).collect::<Vec<_>>();
    assert_eq!(kinds, ["audit.order"]);
}

#[test]
fn the_context_holds_only_what_is_named() {
    assert_eq!(context_of(&compile(&[]).unwrap(), "{}"), None);
    let payload = json!({"a": "{{ request.json.a.b }}", "q": "{{ request.query.dry }}"});
    let templates = compile(&[Spec { payload: Some(payload), ..spec("e") }]).unwrap();
    let context = context_of(&templates, r#"{"a":{"b":[1],"c":2},"card":"4111"}"#).unwrap();
    assert_eq!(
        serde_json::from_slice::<Json>(&context.kept).unwrap(),
        json!({"request": {"json": {"a": {"b": [1]}}, "query": {"dry": "1"}}})
    );
    assert_eq!(context.whole, context.kept);
}

#[test]
fn an_event_goes_to_the_sinks_that_it_names_as_far_as_they_want_it() {
    let subscriber = |sink: &str, patterns: &[&str]| Subscriber {
        sink: sink.to_owned(),
        events: subscription::TypeFilter::Matching(
            patterns.iter().map(|text| subscription::TypePattern::parse(text).unwrap()).collect(),
        ),
    };
    let everything = Subscriber { sink: "all".into(), events: subscription::TypeFilter::All };
    let subscribers =
        [everything, subscriber("orders", &["order.*"]), subscriber("bills", &["bill.*"])];
    let named = |kind: &str, sinks: &[&str]| {
        let sinks = (!sinks.is_empty()).then(|| sinks.iter().map(|s| (*s).to_owned()).collect());
        sinks_of(&Spec { sinks, ..spec(kind) }, &subscribers)
    };
    assert_eq!(named("order.created", &[]), ["all", "orders"]);
    assert_eq!(named("order.created", &["bills", "orders"]), ["orders"]);
    assert_eq!(named("other", &["bills", "orders"]), [""; 0]);
    assert_eq!(named("other", &[]), ["all"]);
}

#[test]
fn each_element_has_an_event_with_a_key_of_its_own() {
    let lines = Spec {
        for_each: Some("response.json.lines".to_owned()),
        event_key: Some("{{ item.sku }}".to_owned()),
        payload: Some(json!({"sku": "{{ item.sku }}", "at": "{{ index }}"})),
        ..spec("line.added")
    };
    let plain = Spec { event_key: None, ..lines.clone() };
    let response = r#"{"lines":[{"sku":"a"},{"sku":"b"},{"sku":"a"},{"none":1}]}"#;
    let rendered = render(&[lines, plain], "", 201, response);
    let name = |event: &Event| event.key.rsplit('/').next().unwrap().to_owned();
    let names = rendered.events.iter().map(name).collect::<Vec<_>>();
    assert_eq!(names, ["a", "b", "a#2", "3", "0", "1", "2", "3#2"]);
    assert_eq!(data(&rendered.events[1]), json!({"sku": "b", "at": 1}));
    assert_eq!(rendered.failed, 2);
}

#[test]
fn what_is_named_in_other_ways_is_kept_too() {
    let body = r#"{"lines":[{"id":4},{"id":5}],"m":{"k":1},"items":7,"n":{"items":[1]}}"#;
    for (template, value) in [
        ("{{ request.json.lines[1].id }}", json!(5)),
        ("{{ request.json.lines|length }}", json!(2)),
        ("{{ request['json']['items'] }}", json!(7)),
        ("{{ request.json.items }}", json!(7)),
        ("{{ request.json.n.items[0] }}", json!(1)),
        ("{{ request.json.m|items }}", json!([["k", 1]])),
        ("{{ request.json['lines'][0]['id'] }}", json!(4)),
        ("{{ request.json.none is defined }}", json!(false)),
        ("{% set r = request %}{{ r.json.items }}", json!("7")),
        ("{% for l in request.json.lines %}{{ l.id }}{% endfor %}", json!("45")),
    ] {
        let rendered =
            render(&[Spec { payload: Some(json!(template)), ..spec("e") }], body, 201, "{}");
        assert_eq!(data(&rendered.events[0]), value, "{template}");
    }
}

#[test]
fn many_equal_element_keys_take_no_quadratic_time() {
    let each = Spec {
        for_each: Some("response.json".to_owned()),
        event_key: Some("same".to_owned()),
        payload: Some(json!(1)),
        ..spec("e")
    };
    let rendered = render(&[each], "", 201, &format!("[{}0]", "0,".repeat(4999)));
    let keys = rendered.events.iter().map(|event| &event.key).collect::<BTreeSet<_>>();
    assert_eq!(keys.len(), 5000);
    assert_eq!(rendered.events[4999].key, format!("{RECORD}/e/same#5000"));
}

#[test]
fn two_specs_of_one_type_have_two_keys() {
    let rendered = render(&[spec("e"), spec("e")], "", 201, "{}");
    assert_eq!(rendered.events[1].key, format!("{RECORD}/e#2"));
    assert_ne!(rendered.events[0].id, rendered.events[1].id);
}

#[test]
fn what_fails_becomes_an_event_with_the_error() {
    let with = |payload: &str| Spec { payload: Some(json!({ "v": payload })), ..spec("e") };
    let when = Spec { when: Some("response.json.a.b".to_owned()), ..spec("e") };
    let each = Spec { for_each: Some("response.status".to_owned()), ..spec("e") };
    for bad in [
        with("{{ response.json.none }}"),
        with("x{{ response.json.none }}"),
        with("{{ response.json.none.more }}"),
        with("{{ request.json.a }}"),
        with("{{ response.text * 3000 }}"),
        when,
        each,
    ] {
        let rendered = render(std::slice::from_ref(&bad), "oops", 201, "{}");
        assert_eq!((rendered.events.len(), rendered.failed), (1, 1), "{bad:?}");
        assert!(data(&rendered.events[0])["error"].is_string(), "{bad:?}");
        assert_eq!(rendered.events[0].key, format!("{RECORD}/e"));
    }
    let large = format!("{:?}", "x".repeat(3000));
    let rendered = render(&[], "", 201, &large);
    assert_eq!(rendered.failed, 1);
    assert_eq!(data(&rendered.events[0]), json!({"error": "the message is too large"}));
}

#[test]
fn a_large_answer_is_not_built_again_for_each_element_and_the_events_together_are_bounded() {
    let each = |payload: Json| Spec {
        for_each: Some("response.json.lines".to_owned()),
        payload: Some(payload),
        ..spec("e")
    };
    let lines = "0,".repeat(1999);
    let response = format!(r#"{{"lines":[{lines}0],"blob":"{}"}}"#, "x".repeat(1 << 20));
    let whole = render(&[each(json!({"all": "{{ response.json }}"}))], "", 201, &response);
    assert_eq!((whole.events.len(), whole.failed), (2000, 2000));
    let error = data(&whole.events[1999])["error"].as_str().unwrap().to_owned();
    assert!(error.contains("response.json: its value is too large"), "{error}");

    let some = each(json!({"text": "{{ response.json.blob[:1000] }}"}));
    let many = render(&[some], "", 201, &response);
    let bytes: usize = many.events.iter().map(|event| event.payload.len()).sum();
    assert_eq!(many.events.len(), 2000);
    assert!(many.failed > 1000 && many.failed < 2000, "{}", many.failed);
    // 64 of the largest, and an error in place of each further one.
    assert!(bytes < 64 * 2000 + 2000 * 400, "{bytes}");
    let last = data(&many.events[1999]);
    assert_eq!(last, json!({"error": "the events of this record are too large together"}));
}

#[test]
fn what_is_too_long_to_be_kept_is_seen_by_who_has_it_and_named_by_who_has_not() {
    let payload = json!({"v": "{{ request.json.a }}"});
    let templates = compile(&[Spec { payload: Some(payload), ..spec("e") }, spec("f")]).unwrap();
    let context = |length: usize| {
        context_of(&templates, &format!(r#"{{"a":"{}"}}"#, "x".repeat(length))).unwrap()
    };
    // {"request":{"json":{"a":"..."}}} around the text.
    let least = context(0).kept.len();
    let fits = context(1000 - least);
    assert_eq!((fits.kept.len(), &fits.kept), (1000, &fits.whole));

    let long = context(1001 - least);
    let here = render_with(&templates, Some(&long.whole), 201, "{}");
    assert_eq!((here.events.len(), here.failed), (2, 0));
    assert_eq!(data(&here.events[0])["v"].as_str().unwrap().len(), 1001 - least);
    let elsewhere = render_with(&templates, Some(&long.kept), 201, "{}");
    assert_eq!((elsewhere.events.len(), elsewhere.failed), (2, 1));
    let why = "the templates name 1001 bytes of the request, and policy.context_max keeps 1000";
    assert_eq!(data(&elsewhere.events[0]), json!({ "error": why }));
    // From before the sentence was kept.
    let before = Bytes::from_static(br#"{"too_large":true}"#);
    let why = "the request was too long to be kept";
    let before = render_with(&templates, Some(&before), 201, "{}");
    assert_eq!(data(&before.events[0]), json!({ "error": why }));
    let keys =
        |rendered: &Rendered| rendered.events.iter().map(|e| e.key.clone()).collect::<Vec<_>>();
    assert_eq!(keys(&here), keys(&elsewhere), "under the same keys");
}

#[test]
fn odd_ordering_keys_stand_as_their_hash() {
    let ordered = Spec { ordering_key: Some("{{ response.json.k }}".to_owned()), ..spec("e") };
    let rendered = render(&[ordered], "", 201, r#"{"k":"a\u0000b"}"#);
    assert!(rendered.events[0].ordering_key.as_ref().unwrap().starts_with("sha256:"));
}

#[test]
fn compile_errors_name_field_and_expression() {
    for (bad, field) in [
        (Spec { when: Some("a ==".to_owned()), ..spec("e") }, "when \"a ==\""),
        (Spec { when: Some("respons.status".to_owned()), ..spec("e") }, "\"respons\""),
        (Spec { when: Some("request.body".to_owned()), ..spec("e") }, "\"body\""),
        (Spec { when: Some("item".to_owned()), ..spec("e") }, "\"item\""),
        (Spec { payload: Some(json!({"a": ["{{ x"]})), ..spec("e") }, "payload.a"),
        (Spec { event_key: Some("{{ key }}".to_owned()), ..spec("e") }, "for_each"),
        (Spec { sinks: Some(vec!["other".to_owned()]), ..spec("e") }, "\"other\""),
        (spec(""), "type"),
    ] {
        let errors = compile(&[bad]).unwrap_err();
        assert!(errors[0].contains(field), "{errors:?}");
    }
}

proptest::proptest! {
    #[test]
    fn no_answer_or_context_panics(
        context in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..50),
        body in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..50),
    ) {
        let payload = json!({"v": "{{ request.json }}{{ response.text }}"});
        let templates = compile(&[Spec { payload: Some(payload), ..spec("e") }]).unwrap();
        let rendered = templates.render(&Origin {
            record: RECORD.into(),
            scope: &Scope {
                tenant: Tenant::parse("acme").unwrap(),
                operation: Operation::parse("o").unwrap(),
                key: Key::parse("k").unwrap(),
            },
            attempt: Attempt::FIRST,
            at: SystemTime::UNIX_EPOCH,
            context: Some(&context),
            answer: &Answer {
                status: StatusCode::OK,
                headers: HeaderMap::new(),
                spelling: Spelling::default(),
                body: KeptBody::Whole(body.into()),
            },
        });
        proptest::prop_assert_eq!(rendered.events.len(), 1);
    }
}
