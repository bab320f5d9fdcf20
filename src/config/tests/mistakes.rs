//! Every mistake has its location, its cause and its remedy.

use super::{SECRET, good, mistakes, with};

/// What a file says, and the one mistake in it.
const CASES: &[(&str, &str)] = &[
    (
        "[[route]]\nmethod = \"POST\"\npath = \"/a\"\n[[route]]\nmethod = \"POST\"\npath = \"/b\"\nfingerprint = { ignore = [\"$.a\", \"$[\"] }",
        "og.toml:8: route[1].fingerprint.ignore[1]: ignore: \"$[\" is no JSONPath: at position 1, parser error",
    ),
    (
        "[[sink]]\nname = \"a\"\nurl = \"https://a.test\"\nsecret_file = \"sink.secret\"\nmax_refusals = 0",
        "og.toml:6: sink[0].max_refusals: must be a whole number from 1 to 1000000",
    ),
    (
        "policy.fingerprint = { only = [\"$.a\", \"\"] }",
        "og.toml:2: policy.fingerprint.only[1]: only: an entry is empty",
    ),
    (
        "policy.fingerprint = { only = [] }",
        "og.toml:2: policy.fingerprint.only: names nothing; leave it out, and all of the body counts",
    ),
    (
        "policy.fingerprint = { onyl = [\"$.a\"] }",
        "og.toml:2: policy.fingerprint.onyl: unknown field; did you mean `only`?",
    ),
    (
        "policy.fingerprint = { max_decoded = \"much\" }",
        "og.toml:2: policy.fingerprint.max_decoded: not a size; write a size such as \"64KiB\" or \"1MiB\", or a number of bytes",
    ),
    (
        "[[route]]\nmethod = \"POST\"\npath = \"/a/{x\"",
        "og.toml:2: route[0]: POST /a/{x: a '{' has no '}'",
    ),
    (
        "[[route]]\nmethod = \"POST\"\npath = \"/a\"\noperation = \"a\"\n[[route]]\nmethod = \"POST\"\npath = \"/a\"\noperation = \"b\"",
        "og.toml:6: route[1]: POST /a: another route has this method and a path like it, /a",
    ),
    (
        "[[route]]\nmethod = \"POST\"\npath = \"/a\"\n[[route.event]]\ntype = \"a\"\n[[route.event]]\ntype = \"b\"\nwhen = \"response.status ==\"",
        "og.toml:7: route[0].event[1]: event \"b\": when \"response.status ==\": syntax error: unexpected end of input, expected expression (in <expression>:1)",
    ),
    (
        "policy.derive_key = [\"$.a\", \"cookie:a\"]",
        "og.toml:2: policy.derive_key[1]: derive_key: \"cookie:a\" begins with none of \"$\", \"header:\", \"path:\", \"query:\"",
    ),
    (
        "policy.fingerprint = { ignore_xml = [\"//p:a\", \"//x:a\"], xml_namespaces = { p = \"urn:p\" } }",
        "og.toml:2: policy.fingerprint.ignore_xml[1]: ignore_xml: the prefix \"x\" is not known; give its namespace: xml_namespaces = { x = \"...\" }",
    ),
    (
        "policy.fingerprint = { ignore = [\"/a[1]\"] }",
        "og.toml:2: policy.fingerprint.ignore[0]: ignore: \"/a[1]\" is no path that is read here: write steps such as /a/b, //b, p:b, * and, at the end, @b; nothing else of XPath is read",
    ),
    (
        "policy.fingerprint = { xml_namespaces = { xml = \"urn:p\" } }",
        "og.toml:2: policy.fingerprint.xml_namespaces.xml: the prefix \"xml\" has its own meaning in XML; use another one",
    ),
    (
        "policy.fingerprint = { xml_namespaces = { p = 1 } }",
        "og.toml:2: policy.fingerprint.xml_namespaces.p: this is an integer, it must be a text in quotes",
    ),
    (
        "policy.tenant = { client_cert = \"cn\" }",
        "og.toml:2: policy.tenant.client_cert: needs TLS from the caller to this listener, which Oncegate does not speak yet; let the proxy in front check the certificate and name the tenant in a header of its own",
    ),
    (
        "policy.tenant = { jwt_claim = \"/\" }",
        "og.toml:2: policy.tenant.jwt_claim: is not the name of a claim, \"tenant_id\", or a pointer to one, \"/org/id\"",
    ),
    (
        "policy.tenant = { jwt_claim = \"t\", fixed = \"x\" }",
        "og.toml:2: policy.tenant: name exactly one of header, path, host, basic_user, credential, jwt_claim and fixed",
    ),
    (
        "[[route]]\nmethod = \"POST\"\npath = \"/a\"\noperation = \"a\"\ntenant = { jwt_claim = \"t\" }",
        "og.toml: jwt: is missing; the tenant of a is read from a token, and this says which tokens are good",
    ),
    (
        "policy.replay_auth = \"never\"",
        "og.toml:2: policy.replay_auth: must be \"none\" (everybody in the tenant may read), \"same-credential\", or { subrequest = \"/auth\" }",
    ),
    ("policy.replay_auth = {}", "og.toml:2: policy.replay_auth.subrequest: is missing"),
    (
        "policy.replay_auth = { subrequest = \"/a#b\" }",
        "og.toml:2: policy.replay_auth.subrequest: \"/a#b\" is not a path, such as \"/auth\"",
    ),
    (
        "policy.replay_auth = { subrequest = \"auth\" }",
        "og.toml:2: policy.replay_auth.subrequest: \"auth\" is not a URL; write \"https://host/auth\"",
    ),
    (
        "policy.replay_auth = { subrequest = \"/auth\", timeout = \"0s\" }",
        "og.toml:2: policy.replay_auth.timeout: must be longer than zero",
    ),
    (
        "policy.replay_auth = { subrequest = \"/auth\", timout = \"1s\" }",
        "og.toml:2: policy.replay_auth.timout: unknown field; did you mean `timeout`?",
    ),
    (
        "store.url = \"postgres://h/d\"\n[[route]]\nmethod = \"POST\"\npath = \"/a\"\nreplay_auth = \"same-credential\"",
        "og.toml: server.digest_key_file: is missing; a tenant by credential, and the credential that replay_auth compares, is a digest under this key, and every replica on the same database needs the same key",
    ),
    (
        "[[route]]\nmethod = \"POST\"\npath = \"/a/{id}\"\nderive_key = [\"path:id\", \"path:other\"]",
        "og.toml:5: route[0].derive_key[1]: the path \"/a/{id}\" has no parameter {other}",
    ),
    ("[srever]", "og.toml:2: srever: unknown field; did you mean `server`?"),
    ("store = 3", "og.toml:2: store: this is an integer, it must be a table"),
    ("policy.wiat = \"1s\"", "og.toml:2: policy.wiat: unknown field; did you mean `wait`?"),
    ("log.zzz = 1", "og.toml:2: log.zzz: unknown field; known here: format, level"),
    (
        "[policy]\nwait = 10",
        "og.toml:3: policy.wait: this is an integer; write a duration with its unit, such as \"500ms\", \"10s\" or \"24h\"",
    ),
    (
        "[policy]\nwait = \"10 parsecs\"",
        "og.toml:3: policy.wait: \"10 parsecs\" is not a duration; write a duration with its unit, such as \"500ms\", \"10s\" or \"24h\"",
    ),
    (
        "policy.max_request_body = \"1 mile\"",
        "og.toml:2: policy.max_request_body: not a size; write a size such as \"64KiB\" or \"1MiB\", or a number of bytes",
    ),
    (
        "policy.require_key = \"yes\"",
        "og.toml:2: policy.require_key: this is a text, it must be true or false, without quotes",
    ),
    (
        "upstream.reuse_for_keyed = \"36526d\"",
        "og.toml:2: upstream.reuse_for_keyed: must be 100 years at most",
    ),
    ("policy.retention = \"36526d\"", "og.toml:2: policy.retention: must be 100 years at most"),
    ("policy.timeout = \"0s\"", "og.toml:2: policy.timeout: must be longer than zero"),
    (
        "policy.mismatch_status = 500",
        "og.toml:2: policy.mismatch_status: must be a whole number from 400 to 499",
    ),
    (
        "policy.on_unknown = \"ask\"",
        "og.toml:2: policy.on_unknown: must be \"hold\", \"retry\" or \"lookup\"",
    ),
    (
        "policy.mode = \"watch\"",
        "og.toml:2: policy.mode: must be \"protect\" or \"observe\" (forward everything, and only tell what would have been done)",
    ),
    ("policy.lookup = { found = \"true\" }", "og.toml:2: policy.lookup.path: is missing"),
    (
        "policy.lookup = { path = \"/o/{{ response.json.id }}\", found = \"true\" }",
        "og.toml:2: policy.lookup.path: path \"/o/{{ response.json.id }}\": there is no \"response\"",
    ),
    (
        "policy.lookup = { path = \"o\", found = \"true\" }",
        "og.toml:2: policy.lookup.path: path \"o\": it must begin with a slash, and hold no '#'",
    ),
    (
        "policy.lookup = { path = \"/o\", found = \"nobody\" }",
        "og.toml:2: policy.lookup.found: found \"nobody\": there is no \"nobody\"",
    ),
    (
        "policy.lookup = { path = \"/o\", found = \"true\", body = { a = \"{{ request.jsn }}\" } }",
        "og.toml:2: policy.lookup.body: body.a \"request.jsn\": a request has no \"jsn\"",
    ),
    (
        "policy.lookup = { path = \"/o\", found = \"true\", status = 199 }",
        "og.toml:2: policy.lookup.status: must be a status from 200 to 599, or a template that gives one",
    ),
    (
        "policy.lookup = { path = \"/o\", found = \"true\", headers = { Host = \"x\" } }",
        "og.toml:2: policy.lookup.headers: Host is set by the gateway alone",
    ),
    (
        "policy.lookup = { path = \"/o\", found = \"true\", not_found = [500] }",
        "og.toml:2: policy.lookup.not_found[0]: \"500\" is not a status from 400 to 499",
    ),
    (
        "policy.lookup = { path = \"/o\", found = \"true\", method = \"DELETE\" }",
        "og.toml:2: policy.lookup.method: must be \"GET\" or \"POST\": a question that changes nothing",
    ),
    (
        "policy.lookup = { path = \"/o\", found = \"true\", upstream = \"x\" }",
        "og.toml:2: policy.lookup.upstream: no such upstream; known here: default",
    ),
    (
        "policy.lookup = { path = \"/o\", found = \"true\", setle = \"1s\" }",
        "og.toml:2: policy.lookup.setle: unknown field; did you mean `settle`?",
    ),
    (
        "policy.on_unknown = \"lookup\"\n[[route]]\nmethod = \"POST\"\npath = \"/a\"",
        "og.toml:2: policy.on_unknown: \"lookup\" needs to know what to ask: lookup = { path = \"...\", found = \"...\" }",
    ),
    (
        "[[route]]\nmethod = \"POST\"\npath = \"/a\"\non_unknown = \"retry\"\nlookup = { path = \"/o\", found = \"true\" }",
        "og.toml:6: route[0].lookup: has no effect: on_unknown is not \"lookup\"",
    ),
    (
        "[[route]]\nmethod = \"POST\"\npath = \"/a\"\nlookup = { path = \"/o\", found = \"true\" }",
        "og.toml:5: route[0].lookup: has no effect: on_unknown is not \"lookup\"",
    ),
    (
        "policy.late_answer = 60",
        "og.toml:2: policy.late_answer: this is an integer; write a duration with its unit, such as \"500ms\", \"10s\" or \"24h\"",
    ),
    (
        "store.on_unavailable = \"pass\"",
        "og.toml:2: store.on_unavailable: must be \"refuse\" (503 while the store is away) or \"bypass\" (forward unprotected)",
    ),
    (
        "server.late_answers_max = -1",
        "og.toml:2: server.late_answers_max: must be a whole number from 0 to 1000000",
    ),
    ("server.http2 = true", "og.toml:2: server.http2: is not supported yet; leave it out"),
    (
        "policy.tenant = { host = true, header = \"X-T\" }",
        "og.toml:2: policy.tenant: name exactly one of header, path, host, basic_user, credential, jwt_claim and fixed",
    ),
    (
        "policy.key_header = \"a b\"",
        "og.toml:2: policy.key_header: \"a b\" cannot be the name of a header",
    ),
    (
        "policy.unknown_on = [\"503 with Retry-After\"]",
        "og.toml:2: policy.unknown_on[0]: \"503 with Retry-After\" is not a status; write 429, \"503+retry-after\" (with that header), \"503-retry-after\" (without it) or \"5xx\"",
    ),
    (
        "policy.unknown_on = [429]\npolicy.release_on = [400, 429]",
        "og.toml:2: policy.unknown_on: names an answer that release_on names too; keep it in one of them",
    ),
    (
        "policy.unknown_on = [\"1xx\"]",
        "og.toml:2: policy.unknown_on[0]: \"1xx\" is not a status; write 429, \"503+retry-after\" (with that header), \"503-retry-after\" (without it) or \"5xx\"",
    ),
    (
        "policy.unknown_on = [\"5xx\", 400]\npolicy.release_on = [503, \"5xx\"]",
        "og.toml:2: policy.unknown_on: names an answer that release_on names too; keep it in one of them",
    ),
    (
        "[upstreams.x]\nurl = \"http://a:65536\"",
        "og.toml:3: upstreams.x.url: has the invalid port \"65536\"; a port is a number from 1 to 65535",
    ),
    (
        "server.buffered_bytes_max = \"2MiB\"\n[[route]]\nmethod = \"POST\"\npath = \"/a\"\nmax_response_body = \"1025KiB\"",
        "og.toml:2: server.buffered_bytes_max: is less than the largest max_request_body and max_response_body together: a request takes room for both",
    ),
    (
        "admin.listen = \"0.0.0.0:9090\"",
        "og.toml:2: admin.listen: anybody who reaches this address could resolve records; set admin.token_file, or listen on 127.0.0.1",
    ),
    (
        "server.listen = \"8080\"",
        "og.toml:2: server.listen: \"8080\" is not an address; write \"127.0.0.1:8080\" or \"unix:/run/oncegate.sock\"",
    ),
    (
        "server.listen = \"127.0.0.1:9090\"",
        "og.toml: admin.listen: is the same as server.listen; each needs its own address",
    ),
    (
        "server.trusted_proxies = [\"10.0.0.0/40\"]",
        "og.toml:2: server.trusted_proxies[0]: \"10.0.0.0/40\" is not an address or a network such as 10.0.0.0/8",
    ),
    (
        "store.url = \"mysql://root:geheim@db/x\"",
        "og.toml:2: store.url: must begin with \"sqlite:\" and a path, or with \"postgres://\"",
    ),
    (
        "store.lease = \"1s\"",
        "og.toml:2: store.lease: must be at least \"3s\": it is renewed three times in it",
    ),
    (
        "store.wait_at_start = \"30s\"",
        "og.toml:2: store.wait_at_start: a SQLite file is there at the start, or it is not: only a Postgres is waited for; leave it out",
    ),
    (
        "store.wait_at_start = \"never\"",
        "og.toml:2: store.wait_at_start: must be \"forever\", or a duration with its unit such as \"500ms\"",
    ),
    (
        "upstream.reuse_for_keyed = \"soon\"",
        "og.toml:2: upstream.reuse_for_keyed: must be \"never\", or a duration with its unit such as \"500ms\"",
    ),
    (
        "store.url = \"postgres://db/x\"\n[[route]]\nmethod = \"POST\"\npath = \"/\"\ntenant = { credential = true }",
        "og.toml: server.digest_key_file: is missing; a tenant by credential, and the credential that replay_auth compares, is a digest under this key, and every replica on the same database needs the same key",
    ),
    ("[[route]]\npath = \"/\"", "og.toml:2: route[0].method: is missing"),
    (
        "[[route]]\nmethod = \"post\"\npath = \"/\"",
        "og.toml:3: route[0].method: \"post\" is not a method; write it in capitals, such as \"POST\"",
    ),
    (
        "[[route]]\nmethod = \"GET\"\npath = \"/\"",
        "og.toml:3: route[0].method: GET does not change the upstream, or its answer cannot be stored; it passes through",
    ),
    (
        "[[route]]\nmethod = \"POST\"\npath = \"/a/{id}\"\ntenant = { path = \"account\" }",
        "og.toml:5: route[0].tenant.path: the path \"/a/{id}\" has no parameter {account}",
    ),
    (
        "[[route]]\nmethod = \"POST\"\npath = \"/\"\nupstream = \"bilink\"\n[upstreams.billing]\nurl = \"http://b\"",
        "og.toml:5: route[0].upstream: no such upstream; did you mean `billing`?",
    ),
    (
        "[[route]]\nmethod = \"POST\"\npath = \"/a\"\noperation = \"x\"\n[[route]]\nmethod = \"POST\"\npath = \"/b\"\noperation = \"x\"",
        "og.toml:9: route[1].operation: \"x\" is the operation of another route already; two operations share no key",
    ),
    (
        "[[route]]\nmethod = \"POST\"\npath = \"/a\"\n[[route.event]]\ntype = \"a\"\nsinks = [\"mian\"]",
        "og.toml:7: route[0].event[0].sinks[0]: no such sink; there is none",
    ),
    (
        "[[route]]\nmethod = \"POST\"\npath = \"/a\"\n[[route.event]]\nwhen = \"true\"",
        "og.toml:5: route[0].event[0].type: is missing",
    ),
    (
        "[[sink]]\nname = \"a\"\nsecret_file = \"sink.secret\"\nurl = \"http://example.com/\"",
        "og.toml:5: sink[0].url: plain http shows events to everybody on the way; use https, or set allow_http = true (allow_private = true for a private address)",
    ),
    (
        "[[sink]]\nname = \"a\"\nsecret_file = \"sink.secret\"\nurl = \"https://[::1]/\"",
        "og.toml:5: sink[0].url: is a private address; set allow_private = true if deliveries may go there",
    ),
    (
        "[[sink]]\nname = \"a\"\nurl = \"https://example.com/\"",
        "og.toml:2: sink[0]: needs exactly one of secret_file, secret_env and secret: deliveries are signed with it",
    ),
    (
        "[[sink]]\nname = \"a\"\nurl = \"https://example.com/\"\nsecret = \"geheim\"",
        "og.toml:5: sink[0].secret: each line must be `whsec_` and the base64 of 24 to 64 random bytes: `echo whsec_$(head -c 32 /dev/urandom | base64)`",
    ),
    (
        "[[sink]]\nname = \"a\"\nurl = \"https://example.com/\"\nsecret_env = \"NOT_SET\"",
        "og.toml:5: sink[0].secret_env: the variable NOT_SET is not set",
    ),
    (
        "[[sink]]\nname = \"a\"\nurl = \"https://example.com/\"\nsecret_file = \"sink.secret\"\nformat = \"cloudevent\"",
        "og.toml:6: sink[0].format: must be \"standard-webhooks\", \"cloudevents\" (binary mode) or \"cloudevents-structured\"",
    ),
    (
        "[[sink]]\nname = \"a\"\nurl = \"https://example.com/\"\nsecret_file = \"sink.secret\"\nsubject = \"a\"",
        "og.toml:6: sink[0].subject: does not apply to a webhook, and https:// names a webhook",
    ),
    (
        "[[sink]]\nname = \"a\"\nurl = \"nats://b\"\nsubject = \"a\"\nallow_private = true",
        "og.toml:6: sink[0].allow_private: applies only to a webhook: a broker may have any address, also a private one, and encrypted where its URL says so",
    ),
    (
        "[[sink]]\nname = \"a\"\nurl = \"tls://b\"\nsubject = \"a\"\nstream = \"s\"",
        "og.toml:6: sink[0].stream: does not apply to a NATS sink, and tls:// names a NATS sink",
    ),
    ("[[sink]]\nname = \"a\"\nurl = \"nats://b\"", "og.toml:2: sink[0].subject: is missing"),
    (
        "[[sink]]\nname = \"a\"\nurl = \"nats://b\"\nsubject = \"a.{kind}\"",
        "og.toml:5: sink[0].subject: {kind} is not one of {type}, {tenant}, {operation}",
    ),
    (
        "[[sink]]\nname = \"a\"\nurl = \"nats://u:geheim@b\"\nsubject = \"a\"",
        "og.toml:4: sink[0].url: holds a log-in; name it by `user` and `secret_file`",
    ),
    (
        "[[sink]]\nname = \"a\"\nurl = \"nats://b\"\nsubject = \"a\"\nuser = \"u\"",
        "og.toml:6: sink[0].user: needs its password: secret_file, secret_env or secret",
    ),
    (
        "[[sink]]\nname = \"a\"\nurl = \"nats://b\"\nsubject = \"a\"\nsecret_file = \"sink.secret\"",
        "og.toml:6: sink[0].secret_file: must be one line: a password or a token",
    ),
    (
        "[[sink]]\nname = \"a\"\nurl = \"nats://b\"\nsubject = \"a\"\nclient_cert_file = \"sink.secret\"",
        "og.toml:6: sink[0].client_cert_file: stands alone; client_cert_file and client_key_file belong together",
    ),
    ("[[sink]]\nname = \"a\"\nurl = \"redis://b\"", "og.toml:2: sink[0].stream: is missing"),
    (
        "[[sink]]\nname = \"a\"\nurl = \"redis://b/x\"\nstream = \"s\"",
        "og.toml:4: sink[0].url: is no URL of a Redis server; write \"redis://host:6379/0\" or, for TLS, \"rediss://host:6379/0\"",
    ),
    (
        "[[sink]]\nname = \"a\"\nurl = \"redis://b\"\nstream = \"s\"\nca_file = \"sink.secret\"",
        "og.toml:6: sink[0].ca_file: applies only to rediss://b",
    ),
    (
        "[[sink]]\nname = \"a\"\nurl = \"https://example.com/\"\nsecret_file = \"sink.secret\"\nordering = \"tenant\"",
        "og.toml:6: sink[0].ordering: must be \"none\" or \"key\" (events with the same ordering_key one after the other)",
    ),
    (
        "[[sink]]\nname = \"a\"\nurl = \"https://example.com/\"\nsecret_file = \"sink.secret\"\nordering = \"key\"\non_dead = \"skip\"",
        "og.toml:7: sink[0].on_dead: must be \"free\" or \"block\" (what is behind a dead event in its ordering key waits until that one is redelivered or discarded)",
    ),
    (
        "[[sink]]\nname = \"a\"\nurl = \"https://example.com/\"\nsecret_file = \"sink.secret\"\non_dead = \"block\"",
        "og.toml:6: sink[0].on_dead: has no effect without ordering = \"key\": add that, or leave it out",
    ),
    (
        "[[sink]]\nname = \"a\"\nurl = \"https://example.com/\"\nsecret_file = \"sink.secret\"\nbackoff = { base = \"2h\", max = \"1h\" }",
        "og.toml:2: sink[0].backoff: base must be longer than zero and not longer than max",
    ),
];

#[test]
fn every_mistake_has_its_place_its_cause_and_its_remedy() {
    for (text, expected) in CASES {
        assert_eq!(mistakes(&with(text)), [*expected], "{text}");
    }
}

/// Each kind of URL that a file can have, with `PORT` for its port.
const URLS: [&str; 9] = [
    "store.url = \"postgres://u:geheim@db:PORT/x\"",
    "store.url = \"postgres://u:geheim@a:5432,b:PORT/x\"",
    "upstreams.a.url = \"http://api:PORT\"",
    "upstreams.a.url = \"https://[::1]:PORT\"",
    "[[route]]\nmethod = \"POST\"\npath = \"/a\"\nreplay_auth = { subrequest = \"http://auth:PORT/may\" }",
    "[jwt]\nalgorithms = [\"RS256\"]\nissuer = \"i\"\naudience = \"a\"\njwks_url = \"https://keys:PORT/set\"\n\
     [policy]\ntenant = { jwt_claim = \"t\" }\n[[route]]\nmethod = \"POST\"\npath = \"/a\"",
    "[[sink]]\nname = \"a\"\nsecret = \"SECRET\"\nurl = \"https://hooks.example:PORT/h\"",
    "[[sink]]\nname = \"a\"\nsubject = \"s\"\nurl = \"nats://a:4222,nats://b:PORT\"",
    "[[sink]]\nname = \"a\"\nstream = \"s\"\nurl = \"redis://a:PORT/0\"",
];

#[test]
fn a_port_that_is_none_is_a_mistake_in_every_url() {
    for url in URLS {
        let text = |port: &str| with(&url.replace("PORT", port).replace("SECRET", SECRET));
        good(&text("7777"), &[]);
        for port in ["0", "65536", "99999", "-1", "x"] {
            let found = mistakes(&text(port));
            assert!(
                found.len() == 1 && found[0].contains("url") || found[0].contains("subrequest")
            );
            // Where a password could stand in its place, the host says which it is.
            let named = match url.contains("http") || url.contains('@') {
                true => format!("has the invalid port {port:?}"),
                false if url.contains("nats") => "has a colon and no port after \"b\"".to_owned(),
                false => "has a colon and no port after \"a\"".to_owned(),
            };
            let told = found[0].contains(&format!("{named}; a port is a number from 1 to 65535"));
            assert!(told && !found[0].contains("geheim"), "{port}: {found:?}");
        }
    }
    let hidden = mistakes(&with("store.url = \"postgres:///x?host=db&port=0\""));
    assert!(hidden[0].contains("has the invalid port 0"), "{hidden:?}");
}

#[test]
fn no_mistake_in_a_url_repeats_what_may_be_a_password() {
    for url in [
        "postgres://u:ge/heim@db:99999/x",
        "postgres://u:geheim",
        "redis://:geheim",
        "http://u:geheim@a:99999",
        "http://u:ge/heim@a",
        "http://u:ge heim@a",
        "ftp://u:geheim@a",
        "u:geheim@a",
    ] {
        let field = if url.starts_with("postgres") { "store.url" } else { "upstreams.a.url" };
        let text = match url.starts_with("redis") {
            true => format!("[[sink]]\nname = \"a\"\nstream = \"s\"\nurl = {url:?}"),
            false => format!("{field} = {url:?}"),
        };
        let found = mistakes(&with(&text));
        assert!(found.len() == 1 && found[0].contains("url: "), "{url}: {found:?}");
        assert!(!found[0].contains("heim"), "{url}: {found:?}");
    }
}

#[test]
fn a_file_that_is_not_toml_says_where() {
    for wrong in ["wait = = 3", "wait = ", "wait", "[policy"] {
        let text = format!("[upstream]\nurl = \"http://127.0.0.1:1\"\n[policy]\n{wrong}\nx = [\n");
        let found = mistakes(&text);
        assert!(found[0].starts_with("og.toml:4: not TOML: "), "{found:?}");
        assert_eq!(found.len(), 1, "one mistake is one line: {found:?}");
    }
}

#[test]
fn a_missing_upstream_is_named() {
    let expected =
        "og.toml: upstream.url: is missing; write the URL of the API: \"http://127.0.0.1:3000\"";
    assert_eq!(mistakes(""), [expected]);
}

#[test]
fn all_mistakes_are_reported_at_once_in_the_order_of_the_file() {
    let text = "[server]\nlisen = \"a\"\n[policy]\nwait = 1\nkey_header = \"a b\"\n[[route]]\nmethod = \"POST\"\n\
                path = \"/a\"\n[[route]]\nmethod = \"POST\"\npath = \"/b\"\nretention = \"\"\n";
    let found = mistakes(text);
    let locations: Vec<_> =
        found.iter().map(|l| l.splitn(3, ": ").take(2).collect::<Vec<_>>()).collect();
    let expected = [
        ["og.toml:2", "server.lisen"],
        ["og.toml:4", "policy.wait"],
        ["og.toml:5", "policy.key_header"],
        ["og.toml:12", "route[1].retention"],
        ["og.toml", "upstream.url"],
    ];
    assert_eq!(locations, expected);
}
