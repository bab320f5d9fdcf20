//! The code base under test: which module may import which, how long files may be, and words that must not appear.
//!
//! These rules are read from the sources as text, so they hold for code that no test runs. A rule that stands in the
//! way of something better is changed here, with its reason.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::string_slice,
    reason = "a rule that cannot be read must fail its test"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Longest source file, in lines, without its tests.
const LINES_MAX: usize = 600;

struct Source {
    /// `gateway/accept`, for `src/gateway/accept.rs`.
    module: String,
    text: String,
}

impl Source {
    /// The file without its tests, which stand at its foot.
    fn code(&self) -> &str {
        self.text.split("\n#[cfg(test)]\nmod tests").next().unwrap()
    }
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn walk(folder: &Path, into: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { walk(&path, into) } else { into.push(path) }
    }
}

fn sources() -> Vec<Source> {
    let mut paths = Vec::new();
    walk(&root().join("src"), &mut paths);
    paths.retain(|path| path.extension().is_some_and(|end| end == "rs"));
    let module = |path: &PathBuf| {
        let inside = path.strip_prefix(root().join("src")).unwrap();
        inside.with_extension("").to_str().unwrap().to_owned()
    };
    let read = |path: &PathBuf| Source {
        module: module(path),
        text: std::fs::read_to_string(path).unwrap(),
    };
    paths.iter().map(read).collect()
}

/// Rust files of the sources and of the tests.
fn rust_files() -> Vec<(PathBuf, String)> {
    let mut paths = Vec::new();
    walk(&root().join("src"), &mut paths);
    walk(&root().join("tests"), &mut paths);
    paths.retain(|path| path.extension().is_some_and(|end| end == "rs"));
    paths.into_iter().map(|path| (path.clone(), std::fs::read_to_string(&path).unwrap())).collect()
}

/// All files that belong to the project; without git, those of its folders.
fn project_files() -> Vec<(PathBuf, String)> {
    let listed = Command::new("git").args(["ls-files", "-z"]).current_dir(root()).output();
    let mut paths: Vec<PathBuf> = match listed {
        Ok(output) if output.status.success() => {
            let names = String::from_utf8(output.stdout).unwrap();
            names.split('\0').filter(|name| !name.is_empty()).map(|n| root().join(n)).collect()
        }
        Ok(_) | Err(_) => Vec::new(),
    };
    if paths.is_empty() {
        for folder in ["src", "tests", "config", "docs", "migrations"] {
            let folder = root().join(folder);
            if folder.is_dir() {
                walk(&folder, &mut paths);
            }
        }
    }
    // Not UTF-8: not a text.
    let text = |path: PathBuf| std::fs::read_to_string(&path).ok().map(|text| (path, text));
    paths.into_iter().filter_map(text).collect()
}

/// The modules of ours that a text names, as far as the layers are about: the first segment after `crate::`.
fn imports(code: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for line in code.lines().filter(|line| !line.trim_start().starts_with("//")) {
        for (at, _) in line.match_indices("crate::") {
            let name = |text: &str| -> String {
                text.chars().take_while(|c| c.is_ascii_lowercase() || *c == '_').collect()
            };
            let rest = &line[at + "crate::".len()..];
            if let Some(group) = rest.strip_prefix('{') {
                found.extend(group.split(',').map(|part| name(part.trim())));
            } else {
                found.insert(name(rest));
            }
        }
    }
    found.retain(|name| !name.is_empty());
    found
}

/// What a module of each layer may import of ours, itself included. `None`: anything.
fn allowed(module: &str) -> Option<&'static [&'static str]> {
    let top = module.split('/').next().unwrap();
    match top {
        "backoff" | "clock" | "identity" => Some(&[]),
        // The pool has a task that closes what waits for too long.
        "net" => Some(&["net", "tasks"]),
        "record" => Some(&["record"]),
        "fingerprint" => Some(&["fingerprint", "record"]),
        // A derived key reads the body as the fingerprint does.
        "scope" => Some(&["scope", "fingerprint", "record"]),
        "route" => Some(&["route", "scope", "fingerprint", "record"]),
        // Puts into words what the gateway finds, for the admin listener and the command.
        "explain" => Some(&["explain", "route", "scope", "fingerprint", "record"]),
        "telemetry" => Some(&["telemetry", "record"]),
        "tasks" => Some(&["tasks", "backoff", "telemetry"]),
        // It says in the log where it ends the process.
        "fault" => Some(&["fault", "telemetry"]),
        "store" => {
            Some(&["store", "backoff", "identity", "net", "record", "tasks", "telemetry", "fault"])
        }
        "gateway" => Some(&[
            "gateway",
            "backoff",
            "clock",
            "net",
            "explain",
            "route",
            "scope",
            "fingerprint",
            "record",
            "identity",
            "tasks",
            "telemetry",
            "fault",
            "store",
        ]),
        "relay" => Some(&[
            "relay",
            "backoff",
            "clock",
            "net",
            "record",
            "store",
            "tasks",
            "telemetry",
            "fault",
        ]),
        "lease" => Some(&["lease", "backoff", "record", "store", "tasks", "telemetry"]),
        // The sweeper asks the lease's `Contact` whether it may mark other owners dead.
        "sweep" => Some(&["sweep", "lease", "record", "store", "tasks", "telemetry"]),
        "admin" => Some(&[
            "admin",
            "explain",
            "store",
            "record",
            "scope",
            "fingerprint",
            "route",
            "tasks",
            "telemetry",
        ]),
        "config" | "cli" | "demo" | "main" | "lib" => None,
        _ => panic!("src/{module}.rs stands in no layer: give it a place in tests/tidy.rs"),
    }
}

#[test]
fn imports_point_at_meaning_and_never_at_the_next_step() {
    let mut wrong = Vec::new();
    for source in sources() {
        let Some(allowed) = allowed(&source.module) else { continue };
        for import in imports(source.code()) {
            if !allowed.contains(&import.as_str()) {
                wrong.push(format!("src/{}.rs imports crate::{import}", source.module));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The paths that a text names which begin in this crate, without comments: groups are taken apart.
fn paths(code: &str) -> Vec<Vec<String>> {
    let code: String = code
        .lines()
        .map(|line| line.split("//").next().unwrap_or_default())
        .collect::<Vec<_>>()
        .join(" ");
    let mut found = Vec::new();
    for start in ["crate::", "super::", "self::"] {
        for (at, _) in code.match_indices(start) {
            let before = code[..at].chars().next_back().unwrap_or(' ');
            if !before.is_alphanumeric() && before != '_' && before != ':' {
                path(&code[at..], &[], &mut found);
            }
        }
    }
    found
}

/// Reads one path behind `before`, with all of its ends. What comes after it.
fn path<'a>(text: &'a str, before: &[String], found: &mut Vec<Vec<String>>) -> &'a str {
    let mut path = before.to_vec();
    let mut rest = text.trim_start();
    loop {
        if let Some(group) = rest.strip_prefix('{') {
            rest = group.trim_start();
            while !rest.is_empty() && !rest.starts_with('}') {
                let after = self::path(rest, &path, found).trim_start();
                // Whatever is not understood is stepped over.
                let step =
                    after.chars().next().map_or(0, |c| if c == '}' { 0 } else { c.len_utf8() });
                rest = after[step..].trim_start();
            }
            return rest.strip_prefix('}').unwrap_or(rest);
        }
        let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        path.push(rest[..end].to_owned());
        rest = &rest[end..];
        match rest.strip_prefix("::") {
            Some(more) if end > 0 => rest = more,
            _ => break,
        }
    }
    found.push(path);
    rest
}

/// Which file of the crate a name comes from, seen from a file: through modules, and through what they use of their own parts.
fn target(
    tree: &BTreeMap<String, BTreeMap<String, String>>,
    from: &str,
    path: &[String],
) -> String {
    let parent =
        |module: &str| module.rsplit_once('/').map_or(String::new(), |(up, _)| up.to_owned());
    let mut at = from.to_owned();
    for (n, segment) in path.iter().enumerate() {
        let inside = if at.is_empty() { segment.clone() } else { format!("{at}/{segment}") };
        at = match segment.as_str() {
            "crate" if n == 0 => String::new(),
            "self" => at,
            "super" => parent(&at),
            _ if tree.contains_key(&inside) => inside,
            _ => return tree.get(&at).and_then(|uses| uses.get(segment)).cloned().unwrap_or(at),
        };
    }
    at
}

/// Each folder's files that import one another: an arrow for each import, and the file that has it.
fn imports_between_siblings() -> BTreeMap<String, BTreeMap<String, BTreeMap<String, String>>> {
    let sources = sources();
    let mut tree: BTreeMap<String, BTreeMap<String, String>> =
        sources.iter().map(|source| (source.module.clone(), BTreeMap::new())).collect();
    let names: Vec<(String, Vec<Vec<String>>)> =
        sources.iter().map(|source| (source.module.clone(), paths(source.code()))).collect();
    for (module, paths) in &names {
        for path in paths {
            let [root, part, .., name] = path.as_slice() else { continue };
            let part = format!("{module}/{part}");
            if root == "self" && tree.contains_key(&part) {
                tree.get_mut(module).unwrap().insert(name.clone(), part);
            }
        }
    }
    let mut arrows: BTreeMap<String, BTreeMap<String, BTreeMap<String, String>>> = BTreeMap::new();
    for (from, paths) in &names {
        for to in paths.iter().map(|path| target(&tree, from, path)) {
            let (mut a, mut b) = (from.split('/').peekable(), to.split('/').peekable());
            let mut folder = Vec::new();
            while a.peek().is_some() && a.peek() == b.peek() {
                folder.extend(a.next());
                b.next();
            }
            // Of the folders of the crate the layers speak; a file and its own parts are one thing.
            let (Some(a), Some(b), false) = (a.next(), b.next(), folder.is_empty()) else {
                continue;
            };
            let arrows = arrows.entry(folder.join("/")).or_default();
            let arrow = format!("src/{from}.rs -> {to}");
            arrows.entry(a.to_owned()).or_default().entry(b.to_owned()).or_insert(arrow);
        }
    }
    arrows
}

/// The way from a file back to it over the files that it imports, if there is one.
fn circle<'a>(
    arrows: &'a BTreeMap<String, BTreeMap<String, String>>,
    file: &'a str,
) -> Option<Vec<&'a str>> {
    let (mut ways, mut seen) = (vec![vec![file]], BTreeSet::new());
    while !ways.is_empty() {
        let way = ways.remove(0);
        for next in
            arrows.get(*way.last().unwrap()).into_iter().flatten().map(|(next, _)| next.as_str())
        {
            if next == file {
                return Some(way);
            }
            if seen.insert(next) {
                ways.push(way.iter().copied().chain([next]).collect());
            }
        }
    }
    None
}

#[test]
fn files_of_a_folder_import_one_another_in_one_direction() {
    let mut wrong = Vec::new();
    for (folder, arrows) in imports_between_siblings() {
        for file in arrows.keys() {
            let Some(circle) = circle(&arrows, file) else { continue };
            let ends = circle.iter().copied().skip(1).chain([file.as_str()]);
            let imports = circle.iter().zip(ends).map(|(from, to)| arrows[*from][to].clone());
            wrong.push(format!("{folder}/{file}: {}", imports.collect::<Vec<_>>().join(", ")));
        }
    }
    assert!(wrong.is_empty(), "what both need belongs below them:\n{}", wrong.join("\n"));
}

#[test]
fn meaning_knows_no_runtime_and_each_crate_has_its_home() {
    // Crate, and the modules that may name it.
    let homes: &[(&str, &[&str])] = &[
        ("tokio_postgres::", &["store/postgres"]),
        ("bb8::", &["store/postgres"]),
        ("bb8_postgres::", &["store/postgres"]),
        ("rusqlite::", &["store/sqlite"]),
        ("async_nats::", &["relay/sink/nats"]),
        ("redis::aio::", &["relay/sink/redis"]),
        ("ring::", &["scope", "store/sealed/keys", "relay/sink", "admin", "demo"]),
        ("clap::", &["cli", "demo", "main"]),
        ("toml::", &["config"]),
        ("axum::", &["admin", "cli", "demo"]),
        ("prometheus_client::", &["telemetry"]),
        ("tracing_subscriber::", &["telemetry/log", "config/build"]),
        ("hyper::", &["gateway", "relay/sink", "relay/address", "admin", "demo", "cli"]),
        ("hyper_util::", &["gateway", "relay/sink", "relay/address", "admin", "demo", "cli"]),
    ];
    let meaning = ["record", "fingerprint", "scope", "route", "explain"];
    let never = ["tokio", "tracing::", "SystemTime::now", "Instant::now", "std::fs", "std::net"];
    let mut wrong = Vec::new();
    for source in sources() {
        let code: String = source
            .code()
            .lines()
            .filter(|line| !line.trim_start().starts_with("//"))
            .map(|line| format!("{line}\n"))
            .collect();
        let named = |word: &str| {
            code.match_indices(word).any(|(at, _)| {
                let before = code[..at].chars().next_back().unwrap_or(' ');
                !before.is_alphanumeric() && before != '_' && before != ':'
            })
        };
        let within =
            |home: &&str| source.module == **home || source.module.starts_with(&format!("{home}/"));
        for (word, homes) in homes {
            if named(word) && !homes.iter().any(&within) {
                wrong.push(format!("src/{}.rs names {word}", source.module));
            }
        }
        for word in never.iter().filter(|word| named(word)) {
            if meaning.iter().any(within) {
                wrong.push(format!("src/{}.rs names {word}", source.module));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// A task that nobody watches dies in silence; so does a thread.
#[test]
fn tasks_and_threads_are_begun_in_one_place() {
    let bare = ["tokio::spawn(", "thread::spawn(", "thread::Builder", "task::spawn("];
    // The log's own thread is beneath what watches: its lines are counted where it takes none.
    let homes = ["tasks", "telemetry/log"];
    let mut wrong = Vec::new();
    for source in sources().iter().filter(|source| !homes.contains(&source.module.as_str())) {
        for line in source.code().lines().filter(|line| !line.trim_start().starts_with("//")) {
            if bare.iter().any(|word| line.contains(word)) {
                wrong.push(format!("src/{}.rs: {}", source.module, line.trim()));
            }
        }
    }
    assert!(wrong.is_empty(), "begin these in src/tasks.rs:\n{}", wrong.join("\n"));
}

#[test]
fn every_module_says_what_it_is_and_none_is_a_drawer() {
    for source in sources() {
        let module = &source.module;
        assert!(source.text.starts_with("//! "), "src/{module}.rs begins without a //! doc");
        if module.ends_with("tests") {
            continue;
        }
        let lines = source.code().lines().count();
        assert!(lines <= LINES_MAX, "src/{module}.rs has {lines} lines without tests: split it");
    }
}

/// The formatter keeps code narrow, and leaves comments as they are.
#[test]
fn no_comment_is_too_wide_to_be_read() {
    const WIDEST: usize = 128;
    for (path, text) in rust_files() {
        let wide = |line: &&str| line.trim().starts_with("//") && line.chars().count() > WIDEST;
        let wide: Vec<&str> = text.lines().filter(wide).collect();
        assert!(wide.is_empty(), "{}: wrap {wide:#?}", path.display());
    }
}

#[test]
fn a_test_that_cannot_fail_and_an_unfinished_place_are_refused() {
    // Put together, so that this file does not refuse itself.
    let ignored = concat!("#[", "ignore");
    let unfinished = [
        concat!("TO", "DO"),
        concat!("FIX", "ME"),
        concat!("to", "do!("),
        concat!("unimple", "mented!("),
    ];
    let mut wrong = Vec::new();
    for (path, text) in rust_files() {
        let mut before = "";
        for (index, line) in text.lines().enumerate() {
            let trimmed = line.trim();
            let begins = before.is_empty() || before.ends_with([';', '{', '}', ']']);
            let dropped = begins && trimmed.starts_with("matches!(") && trimmed.ends_with(");");
            before = trimmed;
            let open = unfinished.iter().any(|word| line.contains(word));
            if dropped || trimmed.starts_with(ignored) || open {
                wrong.push(format!("{}:{}: {trimmed}", path.display(), index + 1));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Programs that each minimal system has, or that whoever runs `cargo test` has: the others stand in `tests/all.sh`, and are
/// looked for by the tests themselves.
const PROGRAMS: [&str; 4] = ["sh", "mkfifo", "git", "systemd-analyze"];

#[test]
fn tests_start_no_program_that_a_minimal_system_lacks_and_a_drop_fails_nothing() {
    let start = concat!("Command::", "new(\"");
    let drop_begins = concat!("fn drop(", "&mut self)");
    let fails = [".unwrap()", ".expect(", "assert", "panic!("];
    let mut wrong = Vec::new();
    for (path, text) in rust_files() {
        if path.starts_with(root().join("src")) {
            continue;
        }
        for (at, _) in text.match_indices(start) {
            let program = text[at + start.len()..].split('"').next().unwrap_or_default();
            if !PROGRAMS.contains(&program) {
                wrong.push(format!("{}: starts {program:?}", path.display()));
            }
        }
        // A failed test unwinds through it: a second panic there would end the whole run.
        for (at, _) in text.match_indices(drop_begins) {
            let body = text[at..].split("\n    }").next().unwrap_or_default();
            if fails.iter().any(|word| body.contains(word)) {
                wrong.push(format!("{}: a drop that can fail: {body}", path.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn each_test_that_the_guarantees_name_exists() {
    let text = std::fs::read_to_string(root().join("docs/guarantees.md")).unwrap();
    let named: Vec<(&str, &str)> = text
        .split('`')
        .filter_map(|word| word.split_once("::"))
        .filter(|(module, test)| *module != "module" && !test.is_empty())
        .collect();
    assert!(named.len() > 30, "{named:?}");
    for (module, test) in named {
        let path = root().join(format!("tests/it/{module}.rs"));
        let tests = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            tests.contains(&format!("fn {test}(")),
            "docs/guarantees.md names {module}::{test}"
        );
    }
}

#[test]
fn the_project_speaks_of_itself_only() {
    // Places that mean something on one machine, and how the work was organised.
    let banned = [
        concat!("../", "shared"),
        concat!("/work", "/"),
        concat!("helper", " session"),
        concat!("helper", "-session"),
        concat!("DEVELOPERS", ".md"),
        concat!("SIGS", ".md"),
        concat!("BRIEF", ".md"),
        concat!("design", ".md"),
        concat!("style", ".md"),
        concat!("proxy", ".md"),
        concat!("lessons", ".md"),
    ];
    // Registries: a checkout says nothing of where its crates came from. `Cargo.lock` must, and by its own public name only.
    let registries = [concat!("index.crates", ".io"), concat!("static.crates", ".io")];
    let mut wrong = Vec::new();
    for (path, text) in project_files() {
        let lock = path.file_name().is_some_and(|name| name == "Cargo.lock");
        for (index, line) in text.lines().enumerate() {
            let mut words = banned.iter().chain(&registries);
            let foreign = lock
                && line.starts_with("source = ")
                && !line.contains("registry+https://github.com/rust-lang/crates.io-index");
            if words.any(|word| line.contains(word)) || foreign {
                wrong.push(format!("{}:{}: {}", path.display(), index + 1, line.trim()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The text of `docs/` and the README, where there are docs yet.
fn docs() -> Option<String> {
    let folder = root().join("docs");
    let mut paths = Vec::new();
    if folder.is_dir() {
        walk(&folder, &mut paths);
    }
    paths.retain(|path| path.extension().is_some_and(|end| end == "md"));
    if paths.is_empty() {
        return None;
    }
    paths.push(root().join("README.md"));
    Some(paths.iter().filter_map(|path| std::fs::read_to_string(path).ok()).collect())
}

#[test]
fn problems_and_metrics_stand_in_the_docs() {
    let Some(docs) = docs() else { return };
    let sources = sources();
    let text = |module: &str| {
        sources
            .iter()
            .filter(|s| s.module.starts_with(module))
            .map(|s| s.code())
            .collect::<String>()
    };
    let mut missing = Vec::new();
    for name in metric_names(&sources) {
        if !docs.contains(&format!("oncegate_{name}")) {
            missing.push(format!("metric oncegate_{name}"));
        }
    }
    for name in quoted_after(&text("gateway/problem"), &["=> \""]) {
        let problem =
            name.contains('-') && name.chars().all(|c| c.is_ascii_lowercase() || c == '-');
        if problem && !["new-key", "same-key"].contains(&name.as_str()) && !docs.contains(&name) {
            missing.push(format!("problem {name}"));
        }
    }
    assert!(missing.is_empty(), "not in docs/: {}", missing.join(", "));
}

/// The rows of the reading path in `docs/architecture.md`: file, lines, and what a reader learns there.
fn reading_path() -> Vec<(String, usize, String)> {
    let text = std::fs::read_to_string(root().join("docs/architecture.md")).unwrap();
    let mut paragraphs = text.split("\n\n");
    let (title, about) = (paragraphs.next().unwrap(), paragraphs.next().unwrap());
    assert!(title.starts_with("# ") && !about.starts_with('#'), "{title}: {about}");
    assert_eq!(paragraphs.next(), Some("## Read these files in this order"), "where it begins");
    let section = text.split("\n## Read these files in this order\n").nth(1).unwrap();
    let section = section.split("\n## ").next().unwrap();
    let rows = section.lines().filter_map(|line| line.strip_prefix("| `"));
    rows.map(|row| {
        let cells: Vec<&str> = row.trim_end_matches(" |").splitn(3, " | ").collect();
        let [file, lines, learned] = cells[..] else { panic!("not three cells: {row}") };
        (file.trim_end_matches('`').to_owned(), lines.parse().unwrap(), learned.to_owned())
    })
    .collect()
}

/// A fresh engineer reads the core in an hour.
#[test]
fn the_reading_path_is_short_and_names_its_lines() {
    let sources = sources();
    let (mut wrong, mut sum, mut seen) = (Vec::new(), 0, BTreeSet::new());
    for (file, lines, learned) in reading_path() {
        let named = |source: &&Source| format!("src/{}.rs", source.module) == file;
        let Some(source) = sources.iter().find(named) else {
            wrong.push(format!("{file} does not exist"));
            continue;
        };
        let actual = source.code().trim_end().lines().count().next_multiple_of(10);
        if actual != lines {
            wrong.push(format!("{file} has {actual} lines, rounded up to tens, not {lines}"));
        }
        if learned.is_empty() || !seen.insert(file.clone()) {
            wrong.push(format!("{file} is named twice, or it is not said what it teaches"));
        }
        sum += actual;
    }
    if !(1_000..=2_500).contains(&sum) {
        wrong.push(format!("{sum} lines in all: the path is 1,000 to 2,500 lines long"));
    }
    assert!(wrong.is_empty(), "docs/architecture.md:\n{}", wrong.join("\n"));
}

/// `a05a` is A5: the ids at the begin of a test's name, as the legend writes them.
fn ids(name: &str) -> impl Iterator<Item = String> + '_ {
    let id = |word: &str| {
        let (letter, rest) = word.split_at_checked(1)?;
        if !"abcdefr".contains(letter) {
            return None;
        }
        let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
        let number: u32 = digits.parse().ok()?;
        Some(format!("{}{number}", letter.to_ascii_uppercase()))
    };
    name.split('_').map_while(id)
}

#[test]
fn each_test_id_has_its_line_in_the_legend_and_no_line_is_without_a_test() {
    let text = std::fs::read_to_string(root().join("docs/testing.md")).unwrap();
    let legend = text.split("\n## Test ids\n").nth(1).unwrap().split("\n## ").next().unwrap();
    let rows = legend.lines().filter_map(|line| line.strip_prefix("| ")?.split_once(" | "));
    let explained: BTreeSet<String> = rows
        .map(|(id, _)| id.to_owned())
        .filter(|id| id.ends_with(|c: char| c.is_ascii_digit()))
        .collect();
    let mut used = BTreeSet::new();
    for (_, text) in rust_files() {
        for (at, _) in text.match_indices("fn ") {
            let name = text[at + 3..].split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
            used.extend(name.take(1).flat_map(ids));
        }
    }
    let differ: Vec<_> = used.symmetric_difference(&explained).collect();
    assert!(differ.is_empty(), "in the legend or in a test's name, and not in both: {differ:?}");
}

/// The names of all metrics: of the table, and of those that a process counts once.
fn metric_names(sources: &[Source]) -> BTreeSet<String> {
    let code = |module: &str| {
        sources.iter().find(|s| s.module == module).map(Source::code).unwrap_or_default()
    };
    let mut names = quoted_after(code("telemetry/metrics"), &["=> \""]);
    names.extend(quoted_after(code("telemetry/process"), &["register(\""]));
    names
}

/// The quoted words that follow one of the openings, with any white space between the parts.
fn quoted_after(code: &str, openings: &[&str]) -> BTreeSet<String> {
    let dense: String =
        code.split_whitespace().collect::<Vec<_>>().join(" ").replace("( \"", "(\"");
    let words = openings.iter().flat_map(|opening| dense.split(opening).skip(1));
    words.filter_map(|rest| rest.split('"').next()).map(str::to_owned).collect()
}

#[test]
fn a_program_that_is_shipped_has_no_fault_points() {
    // Cargo's own answer: the features of this package as `cargo build` resolves them, and as `cargo test` does.
    let features = |edges: &str| {
        let tree = ["tree", "--locked", "--offline", "--depth", "0", "-f", "{f}", "--edges", edges];
        let asked = Command::new(env!("CARGO")).args(tree).current_dir(root()).output().unwrap();
        assert!(asked.status.success(), "{}", String::from_utf8_lossy(&asked.stderr));
        String::from_utf8(asked.stdout).unwrap().lines().next().unwrap_or_default().to_owned()
    };
    assert_eq!(features("no-dev"), "", "as it is built");
    assert_eq!(features("all"), "fault-points,redis", "as it is tested");
    // Elsewhere the code is the same with and without them.
    let switched = concat!("feature = \"fault", "-points\"");
    for source in sources().iter().filter(|source| source.text.contains(switched)) {
        let module = source.module.as_str();
        assert!(["fault", "store"].contains(&module), "src/{module}.rs is switched by the feature");
    }
}

#[test]
fn the_words_that_this_file_reads_are_still_there() {
    // Were a source renamed or written otherwise, the rules above would hold for nothing.
    let sources = sources();
    let code = |module: &str| {
        sources
            .iter()
            .filter(|s| s.module.starts_with(module))
            .map(|s| s.code())
            .collect::<String>()
    };
    assert!(metric_names(&sources).len() > 35);
    assert!(imports(&code("gateway")).contains("record"));
    assert!(sources.len() > 30);
}
