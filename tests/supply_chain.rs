//! What the program is made of: licences, versions and sources of all crates, by `deny.toml`, and that changes are told.
//!
//! `cargo deny check` says more (advisories, the texts of licences), and needs the network. This needs neither that nor an
//! install.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "what cannot be read must fail its test"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use serde_json::Value;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap()
}

fn cargo(args: &[&str]) -> String {
    let ran = Command::new(env!("CARGO")).args(args).current_dir(root()).output().unwrap();
    assert!(ran.status.success(), "{args:?}: {}", String::from_utf8_lossy(&ran.stderr));
    String::from_utf8(ran.stdout).unwrap()
}

/// All crates that are built on this machine: for the program, its tests, and either's building.
fn packages() -> Vec<Value> {
    let about = cargo(&["-vV"]);
    let host = about.lines().find_map(|line| line.strip_prefix("host: ")).unwrap();
    let metadata = cargo(&[
        "metadata",
        "--locked",
        "--offline",
        "--all-features",
        "--format-version=1",
        "--filter-platform",
        host,
    ]);
    let metadata: Value = serde_json::from_str(&metadata).unwrap();
    let packages = metadata["packages"].as_array().unwrap().clone();
    assert!(packages.len() > 100, "{} crates", packages.len());
    packages
}

fn policy() -> toml::Table {
    read("deny.toml").parse().unwrap()
}

fn named(package: &Value) -> (&str, &str) {
    (package["name"].as_str().unwrap(), package["version"].as_str().unwrap())
}

/// A licence expression of SPDX: `AND` binds more than `OR`; a slash is an `OR` of old. Each licence that it takes goes
/// into `used`.
fn is_allowed(expression: &str, allowed: &BTreeSet<String>, used: &mut BTreeSet<String>) -> bool {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut rest = words.as_slice();
    let answer = any(&mut rest, allowed, used);
    assert!(rest.is_empty(), "{expression:?} is no licence expression");
    answer
}

fn any(rest: &mut &[&str], allowed: &BTreeSet<String>, used: &mut BTreeSet<String>) -> bool {
    let mut answer = all(rest, allowed, used);
    while let ["OR", after @ ..] = rest {
        *rest = after;
        answer |= all(rest, allowed, used);
    }
    answer
}

fn all(rest: &mut &[&str], allowed: &BTreeSet<String>, used: &mut BTreeSet<String>) -> bool {
    let mut answer = one(rest, allowed, used);
    while let ["AND", after @ ..] = rest {
        *rest = after;
        answer &= one(rest, allowed, used);
    }
    answer
}

fn one(rest: &mut &[&str], allowed: &BTreeSet<String>, used: &mut BTreeSet<String>) -> bool {
    let (licence, after) = match rest {
        ["(", after @ ..] => {
            *rest = after;
            let answer = any(rest, allowed, used);
            *rest = rest.strip_prefix(&[")"]).unwrap_or_else(|| panic!("no end at {rest:?}"));
            return answer;
        }
        [licence, "WITH", exception, after @ ..] => (format!("{licence} WITH {exception}"), after),
        [licence, after @ ..] => ((*licence).to_owned(), after),
        [] => panic!("a licence is missing"),
    };
    *rest = after;
    let answer = allowed.contains(&licence);
    if answer {
        used.insert(licence);
    }
    answer
}

#[test]
fn each_crate_has_a_licence_that_is_allowed_and_each_that_is_allowed_is_needed() {
    let policy = policy();
    let allowed = policy["licenses"]["allow"].as_array().unwrap();
    let allowed: BTreeSet<String> =
        allowed.iter().map(|licence| licence.as_str().unwrap().to_owned()).collect();
    let (mut wrong, mut used) = (Vec::new(), BTreeSet::new());
    for package in packages() {
        let licence = package["license"].as_str().unwrap_or("none");
        if !is_allowed(licence, &allowed, &mut used) {
            wrong.push(format!("{} {}: {licence}", named(&package).0, named(&package).1));
        }
    }
    assert!(wrong.is_empty(), "see [licenses] of deny.toml:\n{}", wrong.join("\n"));
    assert_eq!(used, allowed, "needed, and allowed");
}

#[test]
fn licence_expressions_are_read_as_spdx_says() {
    let allowed: BTreeSet<String> =
        ["MIT", "ISC", "Apache-2.0 WITH LLVM-exception"].map(str::to_owned).into();
    for (expression, expected) in [
        ("MIT", true),
        ("GPL-3.0-only", false),
        ("GPL-3.0-only OR MIT", true),
        ("GPL-3.0-only/MIT", true),
        ("GPL-3.0-only AND MIT", false),
        ("MIT OR GPL-3.0-only AND ISC", true),
        ("GPL-3.0-only OR ISC AND MIT", true),
        ("(MIT OR ISC) AND GPL-3.0-only", false),
        ("(GPL-3.0-only OR ISC) AND MIT", true),
        ("Apache-2.0", false),
        ("Apache-2.0 WITH LLVM-exception", true),
    ] {
        assert_eq!(
            is_allowed(expression, &allowed, &mut BTreeSet::new()),
            expected,
            "{expression}"
        );
    }
}

#[test]
fn no_crate_is_built_in_two_versions_but_for_those_that_are_named_with_their_reason() {
    let policy = policy();
    let mut skipped: BTreeSet<String> = BTreeSet::new();
    for skip in policy["bans"]["skip"].as_array().unwrap() {
        assert!(!skip["reason"].as_str().unwrap().is_empty(), "{skip}");
        skipped.insert(skip["crate"].as_str().unwrap().to_owned());
    }
    let packages = packages();
    let mut versions: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for package in &packages {
        let (name, version) = named(package);
        versions.entry(name).or_default().insert(version);
    }
    let mut wrong = Vec::new();
    for (name, versions) in versions.iter().filter(|(_, versions)| versions.len() > 1) {
        let one = |version: &&&str| !skipped.contains(&format!("{name}@{version}"));
        if versions.iter().filter(one).count() > 1 {
            wrong.push(format!("{name}: {versions:?}"));
        }
    }
    assert!(wrong.is_empty(), "see [bans] of deny.toml:\n{}", wrong.join("\n"));
    for skip in skipped {
        let (name, version) = skip.split_once('@').unwrap();
        let twice =
            versions.get(name).is_some_and(|known| known.len() > 1 && known.contains(version));
        assert!(twice, "{skip} is built once, or not at all: leave it out of deny.toml");
    }
}

#[test]
fn each_crate_comes_from_the_one_registry() {
    let policy = policy();
    let registries = policy["sources"]["allow-registry"].as_array().unwrap();
    for package in packages() {
        let Some(source) = package["source"].as_str() else {
            assert_eq!(
                package["name"],
                env!("CARGO_PKG_NAME"),
                "{:?} has no source",
                named(&package)
            );
            continue;
        };
        let registry = source.strip_prefix("registry+");
        let known =
            registry.is_some_and(|url| registries.iter().any(|one| one.as_str() == Some(url)));
        assert!(known, "{:?} comes from {source}", named(&package));
    }
}

#[test]
fn what_changes_is_told_in_the_changelog() {
    let changelog = read("CHANGELOG.md");
    let sections: Vec<&str> =
        changelog.lines().filter_map(|line| line.strip_prefix("## ")).collect();
    let version = format!("[{}]", env!("CARGO_PKG_VERSION"));
    let first = sections.first().copied().unwrap_or_default();
    assert!(first == "[Unreleased]" || first.starts_with(&version), "{sections:?}");
    let kinds = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"];
    for kind in changelog.lines().filter_map(|line| line.strip_prefix("### ")) {
        assert!(kinds.contains(&kind), "{kind:?} is not one of {kinds:?}");
    }
    assert!(read("README.md").contains("(CHANGELOG.md)"), "the README links it");
}
