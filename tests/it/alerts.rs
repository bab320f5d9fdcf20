//! What is shipped for Prometheus and Grafana: each expression asks for metrics, labels and values that exist, and each alert
//! says how bad it is, what it means and where that is explained.
//!
//! Which metrics exist is read from the tables in the sources; the page of a running process shows that they are read rightly.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::support::client::get;
use crate::support::fleet::{self, ONE_EVENT, order};
use crate::support::process::eventually;
use crate::support::rig::{Rig, Which};
use crate::support::sink::{OK, Sink};

const ALERTS: &str = include_str!("../../deploy/prometheus/alerts.yaml");
const DASHBOARD: &str = include_str!("../../deploy/grafana/oncegate.json");
const LABELS: &str = include_str!("../../src/telemetry/labels.rs");
const METRICS: &str = include_str!("../../src/telemetry/metrics.rs");
const PROCESS: &str = include_str!("../../src/telemetry/process.rs");
const PROCFS: &str = include_str!("../../src/telemetry/procfs.rs");

/// What Prometheus adds to each series, and Kubernetes.
const TARGET: [&str; 4] = ["instance", "job", "namespace", "pod"];

/// What PromQL itself knows by name, and Grafana.
const WORDS: [&str; 24] = [
    "abs",
    "absent",
    "and",
    "avg",
    "by",
    "changes",
    "clamp_min",
    "count",
    "group_left",
    "histogram_quantile",
    "ignoring",
    "increase",
    "label_values",
    "max",
    "min",
    "offset",
    "on",
    "or",
    "rate",
    "sum",
    "time",
    "topk",
    "unless",
    "without",
];

/// The labels of a metric, each with its values where these are an enum.
type Labels = BTreeMap<String, Option<BTreeSet<String>>>;

/// All series by name, as Prometheus has them, with their labels.
fn known() -> BTreeMap<String, Labels> {
    let (enums, sets) = (enums(), sets());
    let mut known = BTreeMap::new();
    let mut add = |name: &str, kind: &str| {
        let set = kind.split(['<', '>', ',', ' ']).find(|word| word.starts_with("By"));
        let fields: &[(String, String)] = set.map_or(&[], |set| &sets[set]);
        let values = |kind: &String| enums.get(kind).cloned();
        let labels: Labels =
            fields.iter().map(|(label, kind)| (label.clone(), values(kind))).collect();
        if kind.contains("Histogram") {
            let with_bound = labels.clone().into_iter().chain([("le".to_owned(), None)]).collect();
            known.insert(format!("{name}_bucket"), with_bound);
            known.insert(format!("{name}_sum"), labels.clone());
            known.insert(format!("{name}_count"), labels);
        } else {
            let end = if kind.contains("Counter") { "_total" } else { "" };
            known.insert(format!("{name}{end}"), labels);
        }
    };
    let table = METRICS.split("\nmetrics! {\n").nth(1).unwrap().split("\n}\n").next().unwrap();
    for line in table.lines().filter(|line| line.contains(" => \"")) {
        let (what, name) = line.split_once(" => \"").unwrap();
        let kind = what.split_once(": ").unwrap().1;
        add(&format!("oncegate_{}", name.split('"').next().unwrap()), kind);
    }
    add("oncegate_log_lines_lost", "Family<ByLoss, Counter>");
    add("oncegate_panics", "Counter");
    add("oncegate_task_ends", "Family<ByTask, Counter>");
    for (name, text) in
        [("log_lines_lost", "ByLoss"), ("task_ends", "ByTask"), ("panics", "Counter")]
    {
        assert!(PROCESS.contains(&format!("\"{name}\"")) && PROCESS.contains(text));
    }
    let build = ["version", "revision"].map(|label| (label.to_owned(), None));
    known.insert("oncegate_build_info".to_owned(), build.into());
    for name in PROCFS.split("\"process_").skip(1) {
        let name = format!("process_{}", name.split('"').next().unwrap());
        let end = if name == "process_cpu_seconds" { "_total" } else { "" };
        known.insert(format!("{name}{end}"), Labels::new());
    }
    known
}

/// The enums of labels: their values, as they are shown.
fn enums() -> BTreeMap<String, BTreeSet<String>> {
    let code = LABELS.split("label_enum!(").skip(1);
    code.map(|text| {
        let text = text.split("\n);").next().unwrap();
        let code: String = text.lines().filter(|line| !line.trim().starts_with("//")).collect();
        let name = code.split('{').next().unwrap().trim().to_owned();
        (name, code.split('"').skip(1).step_by(2).map(str::to_owned).collect())
    })
    .collect()
}

/// The sets of labels: each label with its type.
fn sets() -> BTreeMap<String, Vec<(String, String)>> {
    let text = LABELS.split("\nlabel_sets! {\n").nth(1).unwrap().split("\n}").next().unwrap();
    let pair = |field: &str| {
        let (label, kind) = field.split_once(": ").unwrap();
        (label.trim().to_owned(), kind.trim().to_owned())
    };
    text.lines()
        .map(|line| {
            let (name, fields) = line.split_once('{').unwrap();
            let fields = fields.trim_end_matches(['}', ' ']).split(", ").map(pair).collect();
            (name.trim().to_owned(), fields)
        })
        .collect()
}

/// A piece of an expression.
#[derive(Clone, Debug, PartialEq)]
enum Token {
    Word(String),
    Text(String),
    Sign(char),
}

fn tokens(expression: &str) -> Vec<Token> {
    let is_word = |c: char| c.is_ascii_alphanumeric() || "_:.$".contains(c);
    let (mut tokens, mut rest) = (Vec::new(), expression);
    while let Some(first) = rest.chars().next() {
        let end = if first == '"' {
            let end = rest[1..].find('"').unwrap() + 1;
            tokens.push(Token::Text(rest[1..end].to_owned()));
            end + 1
        } else if is_word(first) {
            let end = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
            tokens.push(Token::Word(rest[..end].to_owned()));
            end
        } else {
            if !first.is_whitespace() {
                tokens.push(Token::Sign(first));
            }
            first.len_utf8()
        };
        rest = &rest[end..];
    }
    tokens
}

/// What of an expression does not exist; how many metrics it names.
fn mistakes(expression: &str, known: &BTreeMap<String, Labels>) -> (Vec<String>, usize) {
    let tokens = tokens(expression);
    let (mut wrong, mut named, mut grouped) = (Vec::new(), Vec::new(), Vec::new());
    let mut at = 0;
    while at < tokens.len() {
        let inside = |open: char, close: char, from: usize| -> Vec<Token> {
            let mut rest = tokens[from..].iter();
            if rest.next() != Some(&Token::Sign(open)) {
                return Vec::new();
            }
            rest.take_while(|token| **token != Token::Sign(close)).cloned().collect()
        };
        let Token::Word(word) = &tokens[at] else {
            // The length of a range holds no names.
            at += inside('[', ']', at).len() + 1;
            continue;
        };
        at += 1;
        if ["by", "without", "on", "ignoring"].contains(&word.as_str()) {
            let labels = inside('(', ')', at);
            at += labels.len() + 1;
            grouped.extend(labels.into_iter().filter(|token| matches!(token, Token::Word(_))));
        } else if let Some(labels) = known.get(word) {
            named.push(labels);
            let matchers = inside('{', '}', at);
            at += matchers.len();
            wrong.extend(wrong_matchers(word, &matchers, labels));
        } else if ![&WORDS[..], &TARGET].concat().contains(&word.as_str())
            && !word.starts_with(|c: char| c.is_ascii_digit())
        {
            wrong.push(format!("`{word}` is no metric"));
        }
    }
    for token in grouped {
        let Token::Word(label) = token else { continue };
        if !TARGET.contains(&label.as_str())
            && !named.iter().all(|labels| labels.contains_key(&label))
        {
            wrong.push(format!("not all metrics have the label `{label}`"));
        }
    }
    (wrong, named.len())
}

/// Matchers of labels and values that do not exist. Signs between them need no look: promtool has one.
fn wrong_matchers(metric: &str, matchers: &[Token], labels: &Labels) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut label = "";
    for token in matchers {
        match token {
            Token::Word(name) => {
                label = name;
                if !labels.contains_key(name) && !TARGET.contains(&name.as_str()) {
                    wrong.push(format!("{metric} has no label `{name}`"));
                }
            }
            Token::Text(value) => {
                let Some(Some(values)) = labels.get(label) else { continue };
                let asked = value.split('|').filter(|value| !values.contains(*value));
                wrong.extend(asked.map(|value| format!("{metric} has no {label} `{value}`")));
            }
            Token::Sign(_) => {}
        }
    }
    wrong
}

/// The fields of each alert. The file is written in one way, which this reads; promtool reads all of YAML.
fn alerts() -> Vec<BTreeMap<&'static str, &'static str>> {
    let rules = ALERTS.split("      - alert: ").skip(1);
    rules
        .map(|rule| {
            let name = ("alert", rule.lines().next().unwrap());
            let fields = rule.lines().skip(1).filter_map(|line| line.trim().split_once(": "));
            fields.chain([name]).collect()
        })
        .collect()
}

#[test]
fn each_alert_asks_for_what_exists_and_says_what_it_means() {
    let known = known();
    let alerts = alerts();
    assert!(alerts.len() > 20, "{alerts:?}");
    let names: BTreeSet<_> = alerts.iter().map(|alert| alert["alert"]).collect();
    assert_eq!(names.len(), alerts.len(), "a name is there twice");
    let runbook = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/runbook.md");
    let runbook = std::fs::read_to_string(runbook).ok();
    for alert in &alerts {
        let name = alert["alert"];
        let (wrong, metrics) = mistakes(alert["expr"], &known);
        assert!(wrong.is_empty(), "{name}: {}", wrong.join(", "));
        assert!(metrics > 0, "{name} asks for nothing");
        assert!(
            ["{ severity: critical }", "{ severity: warning }"].contains(&alert["labels"]),
            "{name}"
        );
        assert!(alert["summary"].trim_matches('"').ends_with('.'), "{name}");
        let anchor = name.to_lowercase();
        assert_eq!(alert["runbook_url"], format!("docs/runbook.md#{anchor}"));
        if let Some(runbook) = &runbook {
            let headings = runbook.lines().filter(|line| line.starts_with('#'));
            let mut anchors =
                headings.map(|line| line.trim_start_matches('#').trim().to_lowercase());
            assert!(
                anchors.any(|heading| heading == anchor),
                "docs/runbook.md says nothing of {name}"
            );
        }
    }
}

/// All strings under a name, wherever they stand.
fn strings<'v>(name: &str, value: &'v Value, found: &mut Vec<&'v str>) {
    match value {
        Value::Object(fields) => {
            for (field, value) in fields {
                found.extend(value.as_str().filter(|_| field == name));
                strings(name, value, found);
            }
        }
        Value::Array(values) => values.iter().for_each(|value| strings(name, value, found)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

#[test]
fn each_panel_asks_for_what_exists() {
    let (known, dashboard) = (known(), serde_json::from_str::<Value>(DASHBOARD).unwrap());
    let mut expressions = Vec::new();
    ["expr", "query"].iter().for_each(|name| strings(name, &dashboard, &mut expressions));
    expressions.retain(|expression| *expression != "prometheus");
    assert!(expressions.len() > 40, "{expressions:?}");
    for expression in &expressions {
        let (wrong, metrics) = mistakes(expression, &known);
        assert!(wrong.is_empty() && metrics > 0, "{expression}: {}", wrong.join(", "));
    }
    // In a Grafana of anybody's: the data source is chosen there.
    let mut sources = Vec::new();
    strings("uid", &dashboard, &mut sources);
    sources.retain(|uid| *uid != "oncegate");
    assert!(sources.iter().all(|uid| *uid == "${datasource}"), "{sources:?}");
    // Each metric of the gateway is shown somewhere.
    let asked: Vec<_> = expressions.iter().flat_map(|expression| tokens(expression)).collect();
    let is_shown = |name: &String| asked.contains(&Token::Word(name.clone()));
    let mut missing: Vec<_> = known.keys().filter(|name| name.starts_with("oncegate_")).collect();
    missing.retain(|name| !is_shown(name) && !name.ends_with("_sum") && !name.ends_with("_count"));
    assert!(missing.is_empty(), "no panel shows {missing:?}");
}

#[test]
fn an_expression_that_asks_for_what_does_not_exist_is_found() {
    let known = known();
    for (expression, wanted) in [
        ("oncegate_requests_totals > 0", "`oncegate_requests_totals` is no metric"),
        ("rate(oncegate_requests[5m])", "`oncegate_requests` is no metric"),
        (
            "oncegate_requests_total{outcome=\"failed\"}",
            "oncegate_requests_total has no label `outcome`",
        ),
        (
            "oncegate_requests_total{reply=\"faild\"}",
            "oncegate_requests_total has no reply `faild`",
        ),
        (
            "oncegate_requests_total{reply=~\"failed|lost\"}",
            "oncegate_requests_total has no reply `lost`",
        ),
        ("sum by (sink) (oncegate_settling)", "not all metrics have the label `sink`"),
        ("summe(oncegate_settling)", "`summe` is no metric"),
        ("histogram_quantile(0.9, oncegate_step_seconds)", "`oncegate_step_seconds` is no metric"),
    ] {
        assert_eq!(mistakes(expression, &known).0, [wanted], "{expression}");
    }
    let right = "sum by (job, le, step) (rate(oncegate_step_seconds_bucket{step=\"reserve\"}[5m]))";
    assert_eq!(mistakes(right, &known), (Vec::new(), 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_metrics_that_expressions_are_checked_against_are_those_of_the_page() {
    let sink = Sink::start(|_, _| OK).await;
    let rig = Rig::start(Which::Sqlite, &format!("{ONE_EVENT}{}", fleet::sink(sink.port))).await;
    order("k").to(rig.gateway.addr).await;
    let page = async || {
        let body = get("/metrics").to(rig.gateway.admin).await.body;
        String::from_utf8(body.to_vec()).unwrap()
    };
    eventually("it is delivered", async || page().await.contains("result=\"sent\"} 1")).await;
    let known = known();
    let mut seen = BTreeSet::new();
    for line in page().await.lines().filter(|line| !line.starts_with('#')) {
        let series = line.rsplit_once(' ').unwrap().0;
        let (name, labels) = series.split_once('{').unwrap_or((series, ""));
        let pairs = labels.trim_end_matches('}').split("\",");
        let shown: BTreeSet<_> = pairs
            .filter_map(|pair| pair.split('=').next())
            .filter(|label| !label.is_empty())
            .collect();
        let labels = known.get(name).unwrap_or_else(|| panic!("{name} is not known"));
        assert_eq!(shown, labels.keys().map(String::as_str).collect(), "{line}");
        seen.insert(name.to_owned());
    }
    assert!(seen.len() > 40, "{seen:?}");
    let without_labels = known.iter().filter(|(_, labels)| labels.is_empty()).map(|(name, _)| name);
    for name in without_labels {
        assert!(seen.contains(name), "{name} is not on the page");
    }
}
