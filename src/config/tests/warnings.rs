//! What can be used and is unsafe is warned of, and nothing else is.

use super::*;

#[test]
fn a_tenant_that_nobody_verifies_is_warned_of_unless_reading_is_guarded() {
    let warned = |lines: &str, more: &str| {
        let text = format!("{more}[[route]]\nmethod = \"POST\"\npath = \"/a\"\n{lines}");
        let config = good(&with(&text), &[]);
        check::warnings(&config).into_iter().any(|warning| warning.location == "policy.tenant")
    };
    let header = "tenant = { header = \"X-T\" }\n";
    assert!(warned(header, ""));
    assert!(!warned(&format!("{header}replay_auth = \"same-credential\""), ""));
    assert!(!warned(&format!("{header}replay_auth = {{ subrequest = \"/auth\" }}"), ""));
    let jwt = "[jwt]\nalgorithms = [\"RS256\"]\nissuer = \"i\"\naudience = \"a\"\njwks_url = \"https://a/\"\n";
    assert!(!warned("tenant = { jwt_claim = \"t\" }", jwt));
    let idle = good(&with(jwt), &[]);
    assert!(check::warnings(&idle).iter().any(|warning| warning.location == "jwt"));
}

#[test]
fn a_key_file_that_others_can_read_is_warned_of() {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("the.key");
    std::fs::write(&path, "k t6+PWSJLNKRNL9xASWhknGA1XmJhdCpWM8Jps3Oc5RM=\n").unwrap();
    let warned = |field: &str, mode: u32| {
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        let text = with(&format!("{field} = \"{}\"", path.display()));
        let (_, warnings) = load(&text, &[]).unwrap();
        warnings.into_iter().any(|Warning { location, text }| {
            location == field && text.contains(&format!("{mode:04o}")) && text.contains("chmod 600")
        })
    };
    for field in ["store.encryption_key_file", "server.digest_key_file"] {
        for open in [0o644, 0o640, 0o604, 0o660] {
            assert!(warned(field, open), "{field} {open:o}");
        }
        assert!(!warned(field, 0o600) && !warned(field, 0o400), "{field}");
    }
}

#[test]
fn check_names_what_is_unsafe() {
    let of = |text: &str| {
        let config = good(&with(text), &[]);
        check::warnings(&config).into_iter().map(|warning| warning.location).collect::<Vec<_>>()
    };
    assert_eq!(of(""), ["route"]);
    let quiet = format!(
        "[[sink]]\nname = \"a\"\nurl = \"https://example.com/\"\nsecret = \"{SECRET}\"\n\
         [[route]]\nmethod = \"POST\"\npath = \"/a\"\nforward_key = false\n"
    );
    assert_eq!(of(&quiet), Vec::<String>::new());
    let loud = "[[route]]\nmethod = \"PUT\"\npath = \"/a\"\non_unknown = \"retry\"\ntenant = { header = \"X-T\" }\n\
                retention = \"1m\"\nwait = \"5m\"\n";
    assert_eq!(
        of(loud),
        [
            "policy.tenant",
            "policy.on_unknown",
            "policy.forward_key",
            "route.method",
            "policy.wait",
            "policy.retention",
            "sink"
        ]
    );
}

#[test]
fn an_ordered_sink_whose_events_have_no_key_is_warned_of() {
    let warned = |order: &str, key: &str| {
        let sink =
            "[[sink]]\nname = \"a\"\nurl = \"https://e.com/\"\nsecret_file = \"sink.secret\"";
        let route = "[[route]]\nmethod = \"POST\"\npath = \"/a\"\n[[route.event]]\ntype = \"made\"";
        let config = good(&with(&format!("{sink}\n{order}\n{route}\n{key}")), &[]);
        check::warnings(&config).iter().any(|warning| warning.location == "sink.ordering")
    };
    let (by_key, key) =
        ("ordering = \"key\"\non_dead = \"block\"", "ordering_key = \"{{ tenant }}\"");
    assert!(warned(by_key, ""));
    assert!(!warned(by_key, key) && !warned("", "") && !warned("ordering = \"none\"", ""));
}

#[test]
fn a_look_up_that_may_find_somebody_elses_is_warned_of() {
    const NOTHING: &str = "neither `key` nor anything of `request`";
    const TENANT: &str = "does not name `tenant`";
    let header = "tenant = { header = \"X-Tenant-Id\" }\n";
    let credential = "tenant = { basic_user = true }\n";
    for (tenant, asked, expected) in [
        ("", "path = \"/o\", found = \"true\"", vec![NOTHING]),
        ("", "path = \"/o/{{ tenant }}\", found = \"true\", body = \"{{ key }}\"", vec![NOTHING]),
        ("", "path = \"/o/{{ key }}\", found = \"true\"", vec![]),
        ("", "path = \"/o/{{ request.json.ref }}\", found = \"true\"", vec![]),
        ("", "path = \"/o\", found = \"key in response.json\"", vec![]),
        ("", "path = \"/o\", headers = { X-Key = \"{{ key }}\" }, found = \"true\"", vec![]),
        (header, "path = \"/o\", found = \"true\"", vec![NOTHING, TENANT]),
        (header, "path = \"/o/{{ key }}\", found = \"true\"", vec![TENANT]),
        (header, "path = \"/o/{{ request.headers.other }}\", found = \"true\"", vec![TENANT]),
        (
            header,
            "path = \"/o/{{ key }}\", found = \"true\", body = \"{{ tenant }}\"",
            vec![TENANT],
        ),
        (header, "path = \"/{{ tenant }}/{{ key }}\", found = \"true\"", vec![]),
        (
            header,
            "path = \"/{{ key }}\", headers = { T = \"{{ request.headers['x-tenant-id'] }}\" }, found = \"true\"",
            vec![],
        ),
        (
            credential,
            "path = \"/{{ key }}\", headers = { A = \"{{ request.headers.authorization }}\" }, found = \"true\"",
            vec![],
        ),
    ] {
        let text = format!(
            "[[route]]\nmethod = \"POST\"\npath = \"/a\"\non_unknown = \"lookup\"\n{tenant}lookup = {{ {asked} }}\n"
        );
        let warned = check::warnings(&good(&with(&text), &[]));
        let warned = warned.iter().filter(|warning| warning.location == "policy.lookup");
        let texts = warned.map(|warning| warning.text.as_str()).collect::<Vec<_>>();
        assert_eq!(texts.len(), expected.len(), "{tenant}{asked}: {texts:?}");
        for (text, part) in texts.iter().zip(expected) {
            assert!(text.contains(part), "{tenant}{asked}: {texts:?}");
        }
    }
}
