//! The files that are shipped and the examples of the documentation say what the program does.

use super::*;

fn repository(path: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap()
}

/// The reference with all its defaults switched on.
fn switched_on(reference: &str) -> String {
    let line = |line: &str| {
        let named = line
            .strip_prefix('#')
            .filter(|rest| rest.starts_with(|c: char| c.is_ascii_lowercase()));
        named.unwrap_or(line).to_owned()
    };
    reference.lines().map(line).collect::<Vec<_>>().join("\n")
}

#[test]
fn the_reference_shows_every_default_as_it_is() {
    let reference = repository("config/oncegate.toml");
    let switched = switched_on(&reference);
    assert_ne!(reference, switched);
    // Some defaults are those of Postgres alone.
    for variables in [&[][..], &[("ONCEGATE_STORE_URL", "postgres://db/x")]] {
        let (plain, all) =
            (parts(&good(&reference, variables)), parts(&good(&switched, variables)));
        for (left, right) in plain.iter().zip(&all) {
            assert_eq!(left, right);
        }
        assert_eq!(plain.len(), all.len());
    }
}

/// What a configuration consists of, as texts to compare; without the folder, which differs from load to load.
fn parts(config: &Config) -> Vec<String> {
    let mut parts = vec![
        format!("{:?}", config.server),
        format!("{:?}", config.gateway),
        format!("{:?}", config.admin),
        format!("{:?}", config.store),
        format!("{:?}", config.upstreams),
        format!("{:?} {:?}", config.sweep, config.relay.poll),
        format!("{:?}", config.log),
        format!("{:?}", config.jwt),
    ];
    parts.extend(config.routes.iter().map(|route| format!("{route:?}")));
    parts.extend(config.relay.sinks.iter().map(|sink| format!("{sink:?}")));
    parts
}

#[test]
fn the_reference_names_every_field() {
    let reference = repository("config/oncegate.toml");
    let diagnostics = Diagnostics::default();
    let tree = tree::parse(&reference, &diagnostics);
    drop(file::read(&tree, &diagnostics));
    let asked = diagnostics.all_asked();
    assert!(asked.len() > 90, "{}", asked.len());
    for path in asked {
        let field = path.rsplit('.').next().unwrap();
        let named = reference.lines().any(|line| {
            let line = line.trim_start_matches(['#', ' ']);
            line.starts_with(&format!("{field} = "))
                || line.starts_with(&format!("[{path}]"))
                || line.starts_with(&format!("[[{path}]]"))
        }) || reference.contains(&format!("{{ {field} = "))
            || reference.contains(&format!(", {field} = "))
            || reference.contains("[upstreams.") && path == "upstreams";
        assert!(named, "config/oncegate.toml does not show {path}");
    }
}

#[test]
fn the_small_examples_load() {
    let config = good(&repository("config/sidecar.toml"), &[("SINK_SECRET", SECRET)]);
    assert_eq!((config.facts.len(), config.relay.sinks.len()), (1, 1));
    good(&repository("config/legacy.toml"), &[]);
}

#[test]
fn the_legacy_example_takes_a_message_that_is_signed_anew_for_the_same_request() {
    let config = good(&repository("config/legacy.toml"), &[]);
    let route = config.routes.by_operation("orders.soap").unwrap();
    let mut headers = http::HeaderMap::new();
    headers.insert("content-type", "text/xml; charset=utf-8".parse().unwrap());
    let canonical = |file: &str| {
        let body = repository(&format!("tests/cases/soap/{file}.xml"));
        let parts = crate::fingerprint::Parts {
            method: &http::Method::POST,
            target: "/Orders.asmx",
            headers: &headers,
            body: body.as_bytes(),
        };
        crate::fingerprint::fingerprint(&route.fingerprint, &parts).canonical
    };
    assert_eq!(canonical("signed-first"), canonical("signed-retry"));
}

#[test]
fn the_contract_s_example_loads() {
    let (config, warnings) = load(EXAMPLE, &[]).unwrap();
    assert_eq!(
        config.routes.by_operation("orders.create").unwrap().policy.request_body_max,
        1 << 20
    );
    assert!(warnings.is_empty(), "{warnings:?}");
    // The values of the contract are the defaults: leaving them out changes nothing.
    let kept = [
        "url",
        "tenant",
        "method",
        "path",
        "operation",
        "fingerprint",
        "type",
        "when",
        "payload",
        "name",
        "secret_file",
        "allow_private",
    ];
    let short: Vec<_> = EXAMPLE
        .lines()
        .filter(|line| {
            line.starts_with('[') || kept.iter().any(|name| line.starts_with(&format!("{name} =")))
        })
        .collect();
    let bare = good(&short.join("\n"), &[]);
    assert_eq!(parts(&config), parts(&bare));
}
