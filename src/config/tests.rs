//! What the configuration promises: overrides, secrets, sinks and rights here; what is wrong, what is unsafe and what is
//! shipped below.

mod mistakes;
mod shipped;
mod warnings;

use std::num::NonZeroU32;

use super::*;
use crate::relay::sink;
use crate::route::{Lookup, OnUnknown, ReplayAuth, Server};

const SECRET: &str = "whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE=";

/// The example of the documentation.
const EXAMPLE: &str = r#"
[server]
listen = "127.0.0.1:8080"
[admin]
listen = "127.0.0.1:9090"
[upstream]
url = "http://127.0.0.1:3000"
connect_timeout = "2s"
[store]
url = "sqlite:oncegate.db"
lease = "15s"
[policy]
tenant = { header = "X-Tenant-Id" }
require_key = true
wait = "10s"
timeout = "30s"
retention = "24h"
max_request_body = "1MiB"
max_response_body = "1MiB"
[[route]]
method = "POST"
path = "/accounts/{account}/orders"
operation = "orders.create"
fingerprint = { ignore = ["$.sent_at"] }
[[route.event]]
type = "order.created"
when = "response.status == 201"
payload = { order_id = "{{ response.json.id }}", amount = "{{ request.json.amount }}" }
[[route.event]]
type = "audit.order"
[[sink]]
name = "main"
url = "http://127.0.0.1:4000/hook"
secret_file = "sink.secret"
format = "standard-webhooks"
timeout = "15s"
concurrency = 16
backoff = { base = "1s", max = "1h" }
max_attempts = 20
max_age = "3d"
pause_after = 10
ordering = "none"
allow_private = true
[outbox]
retention = "7d"
"#;

fn load(text: &str, variables: &[(&str, &str)]) -> Result<(Config, Vec<Warning>), Mistakes> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("og.toml");
    std::fs::write(&path, text).unwrap();
    std::fs::write(folder.path().join("sink.secret"), format!("# newest\n{SECRET}\n{SECRET}\n"))
        .unwrap();
    let variables = variables.iter().map(|(name, value)| (name.to_string(), value.to_string()));
    let mut loaded = Config::load(Some(&path), variables, None);
    if let Err(mistakes) = &mut loaded {
        mistakes.file = Some(PathBuf::from("og.toml"));
    }
    loaded
}

fn good(text: &str, variables: &[(&str, &str)]) -> Config {
    load(text, variables).unwrap_or_else(|mistakes| panic!("{mistakes}")).0
}

fn mistakes(text: &str) -> Vec<String> {
    load(text, &[]).expect_err("this file has mistakes").lines()
}

/// What a file says besides what every file must say.
fn with(text: &str) -> String {
    format!("upstream.url = \"http://127.0.0.1:1\"\n{text}")
}

#[test]
fn no_message_and_no_debug_output_shows_a_secret() {
    let text = with(&format!(
        "store.url = \"postgres://u:geheim@db/x\"\nadmin.token = \"geheim\"\n[[sink]]\nname = \"a\"\n\
         url = \"https://example.com/geheim\"\nsecret = \"{SECRET}\"\n"
    ));
    let shown = format!("{:?}", good(&text, &[]));
    assert!(!shown.contains("geheim") && !shown.contains(SECRET), "{shown}");
    let brokers = with(
        "[[sink]]\nname = \"a\"\nurl = \"nats://a\"\nsubject = \"a\"\nuser = \"u\"\nsecret = \"geheim\"\n\
         [[sink]]\nname = \"b\"\nurl = \"redis://b\"\nstream = \"s\"\nsecret_env = \"S\"\n",
    );
    let config = good(&brokers, &[("S", "geheim")]);
    assert!(!format!("{config:?}").contains("geheim"));
    let warned = check::warnings(&config).into_iter().filter(|w| w.location == "sink.url");
    assert_eq!(warned.count(), 2, "both secrets travel unencrypted");
    let wrong = with(
        "store.url = \"x:geheim\"\n[[sink]]\nname = \"a\"\nurl = \"geheim\"\nsecret = \"geheim\"\n",
    );
    let found = mistakes(&wrong).join("\n");
    assert!(!found.contains("geheim"), "{found}");
}

#[test]
fn variables_override_the_file() {
    let variables = [
        ("ONCEGATE_STORE_URL", "postgres://db/x"),
        ("ONCEGATE_UPSTREAM_CONNECT_TIMEOUT", "7s"),
        ("ONCEGATE_SERVER_IN_FLIGHT_MAX", "12"),
        ("ONCEGATE_SERVER_HALF_CLOSE", "true"),
        ("ONCEGATE_SERVER_BUFFERED_BYTES_MAX", "3MiB"),
        ("ONCEGATE_POLICY_TENANT", "{ fixed = \"us\" }"),
        ("ONCEGATE_CONFIG", "/etc/x.toml"),
        ("HOME", "/root"),
    ];
    let text =
        with("upstream.connect_timeout = \"1s\"\n[[route]]\nmethod = \"POST\"\npath = \"/a\"\n");
    let (config, warnings) = load(&text, &variables).unwrap();
    assert!(
        matches!(&config.store.kind, StoreKind::Postgres(pg) if pg.access.location() == "postgres://db:5432/x")
    );
    assert_eq!(config.upstreams[DEFAULT_UPSTREAM].connect_timeout, Duration::from_secs(7));
    assert_eq!(config.gateway.in_flight_max, 12);
    assert!(config.server.accept.half_close);
    assert_eq!(config.gateway.buffered_bytes_max, 3 << 20);
    let tenant = crate::scope::Source::Fixed(crate::record::Tenant::stored("us"));
    assert_eq!(config.routes.iter().next().unwrap().scope.tenant, tenant);
    assert_eq!(warnings, []);
}

#[test]
fn tunnels_are_connections() {
    let wrong =
        with("server = { connections_max = 10, tunnels_max = 11, idle_timeout = \"0s\" }\n");
    let found = mistakes(&wrong);
    let expected = [
        "server.tunnels_max: is more than connections_max (10): each tunnel is one",
        "server.idle_timeout: must be longer than zero",
    ];
    assert_eq!(found.len(), 2, "{found:?}");
    for line in expected {
        assert!(found.iter().any(|found| found.ends_with(line)), "{line}: {found:?}");
    }
    // Fewer connections than the default's tunnels are no mistake, and "0s" is for ever.
    let config = good(
        &with("server = { connections_max = 10 }\nupstream.tunnel_idle_timeout = \"0s\"\n"),
        &[],
    );
    assert_eq!(config.upstreams[DEFAULT_UPSTREAM].tunnel_idle_timeout, None);
}

#[test]
fn a_wrong_variable_is_named_and_a_strange_one_only_warned_of() {
    let wrong = [("ONCEGATE_STORE_LEESE", "15s"), ("ONCEGATE_POLICY_WAIT", "soon")];
    let found = load(&with(""), &wrong).unwrap_err().lines();
    let expected = [
        "ONCEGATE_STORE_LEESE: store.leese: unknown field; did you mean `lease`?",
        "ONCEGATE_POLICY_WAIT: policy.wait: \"soon\" is not a duration; write a duration with its unit, such as \"500ms\", \"10s\" or \"24h\"",
    ];
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(expected.iter().all(|line| found.contains(&line.to_string())), "{found:?}");

    let strange = [
        ("ONCEGATE_FOO_BAR", "1"),
        ("ONCEGATE_ADMIN_SERVICE_HOST", "10.0.0.1"),
        ("ONCEGATE_ADMIN_PORT_9090_TCP", "tcp://10.0.0.1:9090"),
        ("ONCEGATE_ADMIN_PORT", "tcp://10.0.0.1:9090"),
    ];
    let (_, warnings) = load(&with(""), &strange).unwrap();
    let locations: Vec<_> = warnings.iter().map(|warning| warning.location.as_str()).collect();
    let expected = [
        "ONCEGATE_ADMIN_PORT",
        "ONCEGATE_ADMIN_PORT_9090_TCP",
        "ONCEGATE_ADMIN_SERVICE_HOST",
        "ONCEGATE_FOO_BAR",
    ];
    assert_eq!(locations, expected);
}

#[test]
fn without_a_file_every_post_and_patch_with_a_key_is_protected() {
    let (config, _) = Config::load(None, [], Some("http://127.0.0.1:3000")).unwrap();
    assert!(
        matches!(&config.store.kind, StoreKind::Sqlite(location) if location.path == Path::new("oncegate.db"))
    );
    let facts: Vec<_> = config.facts.iter().map(|facts| facts.operation.as_str()).collect();
    assert_eq!(facts, ["POST /{*path}", "PATCH /{*path}", "POST /", "PATCH /"]);
    assert!(config.routes.iter().all(|route| !route.scope.key_required));
    let without = Config::load(None, [], None).unwrap_err().lines();
    assert_eq!(
        without,
        ["upstream.url: is missing; write the URL of the API: \"http://127.0.0.1:3000\""]
    );
}

#[test]
fn a_route_overrides_the_policy_field_by_field() {
    let text = with(
        "policy.wait = \"1s\"\npolicy.late_answer = \"5s\"\npolicy.retention = \"1h\"\npolicy.unknown_on = [429]\n\
         [[route]]\nmethods = [\"POST\", \"PUT\"]\npath = \"/a\"\nwait = \"2s\"\nlate_answer = \"0s\"\nmax_request_body = 17\n\
         [[route]]\nmethods = [\"POST\", \"PUT\"]\npath = \"/b\"\noperation = \"b\"\nrelease_on = [\"503+retry-after\", 429]\nunknown_on = [502]",
    );
    let config = good(&text, &[]);
    let names: Vec<_> = config.routes.iter().map(|route| route.operation.as_str()).collect();
    assert_eq!(names, ["POST /a", "PUT /a", "b"]);
    let a = config.routes.by_operation("PUT /a").unwrap();
    assert_eq!(a.policy.wait, Duration::from_secs(2));
    assert_eq!(a.policy.retention, Duration::from_secs(3600));
    assert_eq!(a.policy.request_body_max, 17);
    assert_eq!(a.policy.late_answer, Duration::ZERO);
    // What is written wins over the default of the other list.
    let code = |status: u16| http::StatusCode::from_u16(status).unwrap();
    use crate::record::outcome::Class;
    assert_eq!(a.outcome.class(code(429), &http::HeaderMap::new()), Class::Unknown);
    assert_eq!(a.outcome.class(code(401), &http::HeaderMap::new()), Class::Released);
    let b = config.routes.by_operation("b").unwrap();
    assert_eq!(b.outcome.class(code(429), &http::HeaderMap::new()), Class::Released);
    assert_eq!(b.outcome.class(code(401), &http::HeaderMap::new()), Class::Stored);
    assert_eq!(b.policy.wait, Duration::from_secs(1));
    assert_eq!(b.policy.late_answer, Duration::from_secs(5));
}

/// What a sink says besides what it must, and the one mistake in it.
#[test]
fn what_a_sink_may_not_say_is_refused_with_its_place() {
    for (line, wrong) in [
        ("events = []", "sink[0].events: names no event; leave it out, and the sink gets all"),
        ("events = [\"a\", \"\"]", "sink[0].events[1]: is not 1 to 255 bytes of visible text"),
        (
            "headers = { Host = \"x\" }",
            "sink[0].headers.Host: is set by Oncegate itself; leave it out",
        ),
        (
            "headers = { Webhook-Id = \"x\" }",
            "sink[0].headers.Webhook-Id: is set by Oncegate itself; leave it out",
        ),
        ("headers = { \"a b\" = \"x\" }", "sink[0].headers.a b: cannot be the name of a header"),
        (
            "headers = { A = \"geheim\\né\" }",
            "sink[0].headers.A: its value must be one line of visible ASCII characters",
        ),
        (
            "headers = { A = { file = \"sink.secret\", env = \"A\" } }",
            "sink[0].headers.A: needs a text, or exactly one of file and env: { file = \"sink.token\" }",
        ),
        ("headers = { A = { env = \"A\" } }", "sink[0].headers.A.env: the variable A is not set"),
        (
            "headers = { A = { fiel = \"A\" } }",
            "sink[0].headers.A.fiel: unknown field; did you mean `file`?",
        ),
        (
            "client_key_file = \"sink.secret\"",
            "sink[0].client_key_file: stands alone; client_cert_file and client_key_file belong together",
        ),
    ] {
        let text = format!(
            "[[sink]]\nname = \"a\"\nurl = \"https://example.com/\"\nsecret = \"{SECRET}\"\n{line}\n"
        );
        assert_eq!(mistakes(&with(&text)), [format!("og.toml:6: {wrong}")], "{line}");
    }
    let source = mistakes(&with("outbox.source = \"a b\""));
    let wrong = "is not a URI; write \"https://shop.example/orders\" or \"/orders\"";
    assert_eq!(source, [format!("og.toml:2: outbox.source: {wrong}")]);
}

/// Tricks by which one server is read and another one dialled, and every notation of an address that is read here.
#[test]
fn f37_no_url_hides_where_deliveries_go() {
    for url in [
        "http://example.com#@127.0.0.1/",
        "http://127.0.0.1#.example.com/",
        "http://example.com\\\\@127.0.0.1/",
        "http://127.0.0.1\\\\.example.com/",
        "http://example.com@127.0.0.1/",
        "http://127.0.0.1@example.com/",
        "http://user:geheim@example.com/",
        "http://127.0.0.1/",
        "http://[::ffff:127.0.0.1]/",
        "http://[::]/",
        "http://0.0.0.0/",
        "http://169.254.169.254/",
        "http://100.64.0.1/",
        "http://[64:ff9b::7f00:1]/",
        "http://[2002:7f00:1::]/",
        "http://exa mple.com/",
        "http:///path",
        "file:///etc/passwd",
    ] {
        let text = format!(
            "[[sink]]\nname = \"a\"\nurl = \"{url}\"\nsecret = \"{SECRET}\"\nallow_http = true\n"
        );
        let found = mistakes(&with(&text));
        assert!(found.len() == 1 && !found[0].contains("geheim"), "{url}: {found:?}");
    }
}

#[test]
fn what_a_sink_wants_and_how_it_is_spoken_to_is_read() {
    let text = with(
        "outbox.source = \"/shop\"\n[[sink]]\nname = \"a\"\nurl = \"https://example.com/\"\n\
         secret_file = \"sink.secret\"\nevents = [\"order.*\", \"bill.*\", \"record.unknown\"]\n\
         format = \"cloudevents\"\nheaders = { Authorization = { file = \"sink.secret\" }, X-A = \"b\", X-E = { env = \"E\" } }\n\
         [[route]]\nmethod = \"POST\"\npath = \"/a\"\noperation = \"order.a\"\nforward_key = false\n",
    );
    // One line of a file is a value; this one has three.
    let (one, three) = (text.replace("{ file = \"sink.secret\" }", "{ env = \"T\" }"), text);
    let wrong = load(&three, &[("E", "e")]).unwrap_err().lines();
    assert!(wrong[0].contains("visible ASCII") && wrong.len() == 1, "{wrong:?}");
    let config = good(&one, &[("E", " e\n"), ("T", "Bearer t")]);
    let read = webhook(&config);
    assert_eq!((read.source.as_str(), read.format), ("/shop", sink::http::Format::CloudEvents));
    let headers = ["authorization", "x-a", "x-e"].map(|name| read.headers[name].to_str().unwrap());
    assert_eq!(headers, ["Bearer t", "b", "e"]);
    assert!(read.secret_file.as_ref().is_some_and(|file| file.ends_with("sink.secret")));
    let type_filter = &config.relay.sinks[0].events;
    assert!(type_filter.includes("order.paid") && !type_filter.includes("orders"));
    let events: Vec<_> = config.routes.iter().flat_map(|route| route.events.kinds()).collect();
    assert_eq!(events, ["order.a"]);
    let told = check::warnings(&config).into_iter().map(|warning| warning.text);
    let told: Vec<_> = told.filter(|text| text.contains("no route has an event")).collect();
    assert_eq!(told.len(), 2, "bill.* and, as it is not announced, record.unknown: {told:?}");
}

fn webhook(config: &Config) -> &sink::http::Settings {
    let sink::Target::Http(webhook) = &config.relay.sinks[0].target else { panic!("a webhook") };
    webhook
}

#[test]
fn secrets_come_from_a_file_a_variable_or_the_field() {
    let sink = |line: &str| {
        with(&format!("[[sink]]\nname = \"a\"\nurl = \"https://example.com/\"\n{line}\n"))
    };
    let file = good(&sink("secret_file = \"sink.secret\""), &[]);
    assert_eq!(webhook(&file).secrets, [SECRET, SECRET]);
    let variable = good(&sink("secret_env = \"S\""), &[("S", SECRET)]);
    assert_eq!(webhook(&variable).secrets, [SECRET]);
    let token = good(&with(""), &[("ONCEGATE_ADMIN_TOKEN", " t \n")]);
    assert_eq!(token.admin.token.as_deref(), Some("t"));
}

#[test]
fn an_image_may_say_where_to_listen_by_default_and_file_and_variable_say_it_first() {
    let image = (DEFAULT_LISTEN_VARIABLE, "0.0.0.0:8080");
    let listen = |text: &str, variables: &[(&str, &str)]| good(text, variables).server.listen;
    let by_default = listen(&with(""), &[image]);
    assert_eq!(by_default.address, "0.0.0.0:8080");
    assert_eq!(by_default.setting, "server.listen, by ONCEGATE_DEFAULT_LISTEN");
    let file = with("server.listen = \"127.0.0.1:1\"");
    assert_eq!(listen(&file, &[image]).address, "127.0.0.1:1");
    let variable = ("ONCEGATE_SERVER_LISTEN", "127.0.0.1:2");
    assert_eq!(listen(&with(""), &[image, variable]).address, "127.0.0.1:2");
    assert_eq!(listen(&with(""), &[(image.0, "")]).address, "127.0.0.1:8080");
    let wrong = load(&with(""), &[(image.0, "everywhere")]).unwrap_err().lines();
    assert_eq!(wrong.len(), 1, "{wrong:?}");
    assert!(wrong[0].starts_with("ONCEGATE_DEFAULT_LISTEN: \"everywhere\" is not an address; "));
}

#[test]
fn where_the_admin_listener_is_can_be_read_out_of_a_file_with_mistakes_elsewhere() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("og.toml");
    let read = |text: &str, variables: &[(&str, &str)]| {
        std::fs::write(&file, text).unwrap();
        let variables = variables.iter().map(|(name, value)| ((*name).into(), (*value).into()));
        admin_address(Some(&file), variables)
    };
    let there = "admin.listen = \"0.0.0.0:9\"\nstore.password_file = \"gone\"\nnone = 1\n";
    assert_eq!(read(there, &[]).as_deref(), Ok("0.0.0.0:9"));
    let variable = ("ONCEGATE_ADMIN_LISTEN", "127.0.0.1:8");
    assert_eq!(read(there, &[variable]).as_deref(), Ok("127.0.0.1:8"));
    assert_eq!(read("", &[]).as_deref(), Ok("127.0.0.1:9090"));
    let told = read("admin.listen = 9090", &[]).unwrap_err().to_string();
    assert!(told.contains(":1: admin.listen: "), "{told}");
    assert!(read("admin.listen = ", &[]).is_err());
    assert_eq!(admin_address(None, []).as_deref(), Ok("127.0.0.1:9090"));
}

#[test]
fn a_digest_key_is_made_beside_the_sqlite_file_and_on_postgres_nowhere() {
    let key = |store: &str| good(&with(&format!("store.url = \"{store}\"")), &[]).digest_key;
    let beside = DigestKeySource::Made(PathBuf::from("/var/lib/x/oncegate.key"));
    assert_eq!(key("sqlite:/var/lib/x/o.db"), beside);
    assert_eq!(key("postgres://u@h/d"), DigestKeySource::Process);
}

/// `[jwt]` with these lines beside issuer, audience and algorithms.
fn jwt_section(lines: &str) -> String {
    with(&format!(
        "[jwt]\nalgorithms = [\"RS256\"]\nissuer = \"i\"\naudience = \"a\"\n{lines}\n[[route]]\nmethod = \"POST\"\npath = \"/a\"\ntenant = {{ jwt_claim = \"t\" }}\n"
    ))
}

fn key_path(name: &str) -> String {
    format!("{}/tests/keys/{name}", env!("CARGO_MANIFEST_DIR"))
}

#[test]
#[expect(clippy::too_many_lines, reason = "a table of mistakes")]
fn tokens_are_checked_with_keys_from_one_place_that_fit_their_algorithms() {
    let public = key_path("rsa.pub.pem");
    let config = good(&jwt_section(&format!("key_file = \"{public}\"")), &[]);
    let Some(tokens::Settings { rules, source: tokens::KeySource::Fixed(keys) }) = &config.jwt
    else {
        panic!("{:?}", config.jwt)
    };
    assert_eq!((keys.count(), rules.leeway), (1, Duration::from_secs(30)));
    assert_eq!((rules.issuer.as_str(), rules.audiences.as_slice()), ("i", &["a".to_owned()][..]));
    let config = good(&jwt_section("jwks_url = \"https://issuer.example:8443/keys?v=1\""), &[]);
    let Some(tokens::Settings { source: tokens::KeySource::Url(remote), .. }) = &config.jwt else {
        panic!("{:?}", config.jwt)
    };
    assert_eq!(remote.server.url.to_string(), "https://issuer.example:8443/");
    assert_eq!(remote.target, "/keys?v=1");
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let secret = file("secret", &format!("{}\n", "s".repeat(32)));
    let short = file("short", "too short\n");
    let set = file("set", "{\"keys\":[{\"kty\":\"oct\",\"k\":\"AAAA\"}]}");
    let hs256 = |text: &str| jwt_section(text).replace("RS256", "HS256");
    assert!(good(&hs256(&format!("secret_file = \"{secret}\"")), &[]).jwt.is_some());
    for (text, wrong) in [
        (jwt_section(""), "jwt: name exactly one of jwks_url, jwks_file, key_file and secret_file"),
        (
            jwt_section(&format!("key_file = \"{public}\"\nsecret_file = \"{secret}\"")),
            "jwt: name exactly one of",
        ),
        (
            jwt_section(&format!("secret_file = \"{secret}\"")),
            "jwt.algorithms[0]: RS256 does not fit the key in",
        ),
        (
            hs256(&format!("key_file = \"{public}\"")),
            "jwt.algorithms[0]: HS256 does not fit the key in",
        ),
        // No way to take a public key for a secret.
        (hs256(&format!("secret_file = \"{public}\"")), "jwt.secret_file: holds a key in PEM"),
        (hs256(&format!("secret_file = \"{short}\"")), "jwt.secret_file: has 9 bytes, too few"),
        (
            hs256("jwks_url = \"https://issuer.example/\""),
            "jwt.algorithms[0]: needs a secret, and secrets are not fetched",
        ),
        (
            jwt_section(&format!("jwks_file = \"{set}\"")),
            "jwt.jwks_file: holds no key that can be used: keys[0]: is a secret",
        ),
        (jwt_section(&format!("key_file = \"{secret}\"")), "jwt.key_file: holds no public key"),
        (
            jwt_section(&format!("key_file = \"{}\"", key_path("rsa.pem"))),
            "jwt.key_file: holds no public key",
        ),
        (jwt_section("key_file = \"none.pem\""), "jwt.key_file: cannot read"),
        (
            jwt_section("jwks_url = \"http://issuer.example/\""),
            "jwt.jwks_url: over plain http anybody",
        ),
        (
            jwt_section("jwks_url = \"ftp://issuer.example/\""),
            "jwt.jwks_url: \"ftp://issuer.example\" names no http or https server",
        ),
        (
            jwt_section("jwks_url = \"http://127.0.0.1@example.com/jwks.json\""),
            "jwt.jwks_url: a user before the host (`...@`) has no meaning here; write \"https://host/.well-known/jwks.json\"",
        ),
        (
            jwt_section("jwks_url = \"https://a/\"\nleeway = \"1h\""),
            "jwt.leeway: must be at most \"5m\"",
        ),
        (
            jwt_section("jwks_url = \"https://a/\"\ntimeout = \"0s\""),
            "jwt.timeout: must be longer than zero",
        ),
        (
            jwt_section("jwks_url = \"https://a/\"").replace("\"RS256\"", "\"none\""),
            "jwt.algorithms[0]: a token without a signature proves nothing",
        ),
        (
            jwt_section("jwks_url = \"https://a/\"").replace("\"RS256\"", "\"rs256\""),
            "jwt.algorithms[0]: \"rs256\" is not known here",
        ),
        (
            jwt_section("jwks_url = \"https://a/\"").replace("[\"RS256\"]", "[]"),
            "jwt.algorithms: is empty",
        ),
        (
            jwt_section("jwks_url = \"https://a/\"").replace("audience = \"a\"", ""),
            "jwt.audience: is missing",
        ),
        (
            jwt_section("jwks_url = \"https://a/\"").replace("issuer = \"i\"", ""),
            "jwt.issuer: is missing",
        ),
        (
            jwt_section("jwks_url = \"https://a/\"\njwks = 1"),
            "jwt.jwks: unknown field; did you mean `jwks_url`?",
        ),
    ] {
        let found = mistakes(&text);
        assert!(found.len() == 1 && found[0].contains(wrong), "{wrong}: {found:?}");
    }
    for near in ["localhost:8080", "127.0.0.1", "[::1]:80", "10.1.2.3"] {
        good(&jwt_section(&format!("jwks_url = \"http://{near}/\"")), &[]);
    }
    good(&jwt_section("jwks_url = \"http://keys.auth.svc/\"\nallow_http = true"), &[]);
}

#[test]
fn who_may_read_is_said_for_all_routes_and_for_each() {
    let of = |policy: &str, route: &str| {
        let text = format!("{policy}\n[[route]]\nmethod = \"POST\"\npath = \"/a\"\n{route}");
        let config = good(&with(&text), &[]);
        config.routes.iter().next().unwrap().policy.replay_auth.clone()
    };
    let same = "replay_auth = \"same-credential\"";
    assert_eq!(of("", ""), ReplayAuth::Scope);
    assert_eq!(of(&format!("policy.{same}"), ""), ReplayAuth::SameCredential);
    assert_eq!(of(&format!("policy.{same}"), "replay_auth = \"none\""), ReplayAuth::Scope);
    let asked = |text: &str| match of("", &format!("replay_auth = {{ subrequest = \"{text}\" }}")) {
        ReplayAuth::Subrequest(asked) => (asked.server.clone(), asked.target.to_string()),
        ReplayAuth::Scope | ReplayAuth::SameCredential => panic!("nobody is asked"),
    };
    let upstream = Server::Upstream(DEFAULT_UPSTREAM.to_owned());
    assert_eq!(asked("/auth?x=1"), (upstream, "/auth?x=1".to_owned()));
    let server = |base: &str| Server::Url { base: base.to_owned(), ca_file: None };
    assert_eq!(asked("http://auth:9000/v"), (server("http://auth:9000"), "/v".to_owned()));
    assert_eq!(asked("https://auth"), (server("https://auth"), "/".to_owned()));
}

#[test]
fn the_spill_stands_beside_its_database() {
    let of = |store: &str| good(&with(store), &[]).store.spill;
    let default = of("");
    assert_eq!(default.dir, Path::new("oncegate.db.spill"));
    assert_eq!(default.bytes_max, 256 << 20);
    assert_eq!(of("store.url = \"sqlite:/d/x.db\"").dir, Path::new("/d/x.db.spill"));
    assert_eq!(of("store.url = \"postgres://h/d\"").dir, Path::new("oncegate-spill"));
    let given = of("store.spill = { dir = \"/var/spill\", max_size = \"1MiB\" }");
    assert_eq!((given.dir.as_path(), given.bytes_max), (Path::new("/var/spill"), 1 << 20));
    for (text, wrong) in [
        ("{ dir = \"\" }", "og.toml:2: store.spill.dir: must name a folder"),
        ("{ max_size = 17 }", "og.toml:2: store.spill.max_size: must be at least \"64KiB\""),
        ("{ size = 1 }", "og.toml:2: store.spill.size: unknown field; known here: dir, max_size"),
    ] {
        assert_eq!(mistakes(&with(&format!("store.spill = {text}"))), [wrong]);
    }
    let small = good(
        &with("store.spill = { max_size = \"1MiB\" }\n[[route]]\nmethod = \"POST\"\npath = \"/a\""),
        &[],
    );
    let warned = check::warnings(&small);
    assert!(warned.iter().any(|warning| warning.location == "store.spill.max_size"), "{warned:?}");
}

#[test]
fn a_look_up_is_taken_from_the_policy_and_settles_after_the_timeout_by_itself() {
    let lookup = |text: &str| {
        let config = good(&with(text), &[]);
        let route = config.routes.iter().next().unwrap().clone();
        let OnUnknown::Lookup(lookup) = &route.policy.on_unknown else { panic!("no look-up") };
        let warned = check::warnings(&config).iter().any(|w| w.location == "policy.lookup");
        let Lookup { delay, timeout, upstream, .. } = &**lookup;
        (
            delay.after_loss.as_secs(),
            delay.after_lease.as_secs(),
            timeout.as_secs(),
            upstream.clone(),
            warned,
        )
    };
    let route = "[[route]]\nmethod = \"POST\"\npath = \"/a\"\non_unknown = \"lookup\"\n";
    let shared =
        "policy.lookup = { path = \"/o/{{ key }}\", found = \"true\" }\npolicy.timeout = \"7s\"\n";
    assert_eq!(lookup(&format!("{shared}{route}")), (7, 14, 5, "default".to_owned(), false));
    let own = "lookup = { path = \"/o\", found = \"true\", settle = \"2s\", timeout = \"1s\", upstream = \"b\" }\n";
    let other = "[upstreams.b]\nurl = \"http://127.0.0.1:1\"\n";
    assert_eq!(lookup(&format!("{shared}{route}{own}{other}")), (2, 9, 1, "b".to_owned(), true));
}

#[test]
fn the_delivery_may_be_left_to_another_process_but_not_of_a_file() {
    let with = |more: &str| {
        let text = EXAMPLE.replace("[outbox]\n", &format!("[outbox]\n{more}\n"));
        load(&text.replace("sqlite:oncegate.db", "postgres://o@127.0.0.1/o"), &[])
    };
    assert_eq!(with("").unwrap().0.relay_mode, RelayMode::InProcess);
    assert_eq!(with("relay = true").unwrap().0.relay_mode, RelayMode::InProcess);
    assert_eq!(with("relay = false").unwrap().0.relay_mode, RelayMode::Separate);
    let wrong = |text: String| load(&text, &[]).unwrap_err().to_string();
    let text = wrong(EXAMPLE.replace("[outbox]\n", "[outbox]\nrelay = false\n"));
    assert!(text.contains("outbox.relay") && text.contains("nobody else can deliver"), "{text}");
}

#[test]
fn the_backlog_has_a_ceiling_where_one_is_named_and_a_low_one_is_warned_of() {
    let of = |more: &str| {
        load(&EXAMPLE.replace("[outbox]\n", &format!("[outbox]\n{more}\n")), &[]).unwrap()
    };
    let most = |more: &str| of(more).0.sweep.backlog.most().map(NonZeroU32::get);
    assert_eq!((most(""), most("backlog_max = 0")), (None, None));
    assert_eq!(most("backlog_max = 2000000"), Some(2_000_000));
    let warned = |more: &str| {
        let (config, _) = of(more);
        let warnings = check::warnings(&config);
        warnings.iter().any(|warning| warning.location == "outbox.backlog_max")
    };
    assert!(warned("backlog_max = 999") && !warned("backlog_max = 1000") && !warned(""));
    let wrong = mistakes(&with("outbox.backlog_max = -1"));
    assert_eq!(
        wrong,
        ["og.toml:2: outbox.backlog_max: must be a whole number from 0 to 4294967295"]
    );
}
