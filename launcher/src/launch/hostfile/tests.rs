use super::{Host, choose::choose, parse, parse_bytes, place, same_name};
use crate::cli::Args;
use crate::error::Failure;
use crate::rank_env::Env;
use crate::rank_env::identity::NodeAssignment;
use crate::ui::Event;
use proptest::prelude::*;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

fn read(text: &str) -> Result<Vec<Host>, Failure> {
    parse(text, Path::new("hosts"))
}

fn short(hosts: &[Host]) -> String {
    let words = hosts.iter().map(|host| {
        let slots: Vec<String> = host.slots.iter().map(usize::to_string).collect();
        format!("{}:{}", host.name, slots.join(","))
    });
    words.collect::<Vec<_>>().join(" ")
}

#[test]
fn machines_are_read_with_their_slots() {
    let text = "# all\n\n gpu01 slots=2  # the first\ngpu02\tslots=3 max_slots=8\n10.0.0.7\nfe80::1 slots=1\r\n";
    let hosts = read(text).expect("reads");
    assert_eq!(short(&hosts), "gpu01:0,1 gpu02:0,1,2 10.0.0.7:0 fe80::1:0");
    let lines: Vec<usize> = hosts.iter().map(|host| host.line).collect();
    assert_eq!(lines, [3, 4, 5, 6]);
}

#[test]
fn errors_are_named_with_their_line() {
    for (text, words) in [
        ("", "hosts lists no machine"),
        ("# nothing\n\n", "hosts lists no machine"),
        ("a slots=2\nb\na slots=1", "line 3: a is already on line 1"),
        ("a slots=0", "line 1: slots=0"),
        ("\na slots=-1", "line 2: slots=-1"),
        ("a slots=x", "line 1: slots=x"),
        ("a slots=", "line 1: slots= "),
        ("a slots=99999999999999999999", "line 1: slots=9"),
        ("a slots=1 slots=2", "line 1: slots are given twice"),
        ("a 4", "line 1: '4' is not understood"),
        ("a slot=4", "line 1: 'slot=4' is not understood"),
        ("slots=4", "line 1: 'slots=4' is not a machine name"),
        ("a;b", "line 1: 'a;b' is not a machine name"),
    ] {
        let failure = read(text).expect_err(text);
        assert_eq!(failure.code.status(), 2);
        assert!(failure.title.contains(words), "{text:?}: {failure}");
    }
}

#[test]
fn hostfiles_with_too_many_slots_or_no_text_are_refused() {
    let many = |hosts: usize| -> String {
        let lines = (0..hosts).map(|host| format!("h{host} slots=4096\n"));
        lines.collect()
    };
    assert_eq!(read(&many(16)).expect("reads").len(), 16);
    let failure = read(&many(17)).expect_err("too many");
    let title = &failure.title;
    assert!(
        title.contains("line 17: there are more than 65536 slots"),
        "{failure}"
    );
    let failure = parse_bytes(b"a\n\xff", Path::new("hosts")).expect_err("no text");
    assert!(
        failure.title.contains("line 2 is not UTF-8 text"),
        "{failure}"
    );
    let failure = parse_bytes(&vec![b'#'; 2 << 20], Path::new("hosts")).expect_err("too long");
    assert!(
        failure.title.contains("more than 1048576 bytes"),
        "{failure}"
    );
}

#[test]
fn include_and_exclude_choose_machines_and_slots() {
    let hosts = || read("a slots=2\nb slots=4\nfe80::1 slots=2").expect("reads");
    for (include, exclude, left) in [
        (None, None, "a:0,1 b:0,1,2,3 fe80::1:0,1"),
        (Some("b"), None, "b:0,1,2,3"),
        (Some("b:2,0@a"), None, "a:0,1 b:0,2"),
        (Some("fe80::1:1"), None, "fe80::1:1"),
        (None, Some("a"), "b:0,1,2,3 fe80::1:0,1"),
        (None, Some("b:0,1@fe80::1"), "a:0,1 b:2,3"),
        (None, Some("a:0,1"), "b:0,1,2,3 fe80::1:0,1"),
    ] {
        let chosen = choose(hosts(), include, exclude).expect("chooses");
        assert_eq!(short(&chosen), left, "{include:?} {exclude:?}");
    }
    for (include, exclude, words) in [
        (Some("a"), Some("b"), "contradict"),
        (Some("c"), None, "'c' is not in the hostfile"),
        (Some("c:0"), None, "'c' is not in the hostfile"),
        (Some("a:2"), None, "not '2'"),
        (Some("a:"), None, "not ''"),
        (Some("a:0,0"), None, "named twice"),
        (Some("a@a"), None, "named twice"),
        (Some(""), None, "'' is not"),
        (None, Some("a@b@fe80::1"), "leaves no machine"),
    ] {
        let failure = choose(hosts(), include, exclude).expect_err(words);
        assert!(failure.title.contains(words), "{failure}");
    }
}

fn placed(
    text: &str,
    args: &Args,
    vars: &[(&str, &str)],
) -> (Result<Option<NodeAssignment>, Failure>, Vec<Event>) {
    let directory = tempfile::tempdir().expect("temp dir");
    let path = directory.path().join("hosts");
    std::fs::write(&path, text).expect("written");
    let args = Args {
        hostfile: Some(path),
        ..args.clone()
    };
    let env = Env::from_lookup(&|name| {
        let found = vars.iter().find(|(key, _)| *key == name);
        found.map(|(_, value)| OsString::from(value))
    });
    let mut shown = Vec::new();
    let argv = ["--hostfile", "hosts", "--model", "a b"].map(str::to_string);
    let place = place(&args, &argv, &env.expect("reads"), &mut |event| {
        shown.push(event);
    });
    (place, shown)
}

#[test]
fn this_machine_finds_its_line_and_prints_the_commands_of_the_others() {
    let text = "192.0.2.9 slots=2\nlocalhost slots=3\n";
    let (place, shown) = placed(text, &Args::default(), &[]);
    let place = place.expect("places").expect("a place");
    assert_eq!((place.node_rank, place.nodes), (1, 2));
    assert_eq!(place.counts, Some(vec![2, 3]));
    assert_eq!(place.master.addr.as_deref(), Some("192.0.2.9"));
    let texts: Vec<&str> = shown
        .iter()
        .filter_map(|event| match event {
            Event::Info { text, .. } => Some(&**text),
            _ => None,
        })
        .collect();
    assert_eq!(
        texts,
        [
            "192.0.2.9 2, localhost 3 · this is localhost",
            "on 192.0.2.9: launcher --hostfile hosts --model 'a b'"
        ]
    );
    // The machine's number comes from the environment if names do not match.
    let vars = [("NNODES", "2"), ("NODE_RANK", "0"), ("MASTER_PORT", "4000")];
    let (place, _) = placed(text, &Args::default(), &vars);
    let place = place.expect("places").expect("a place");
    assert_eq!((place.node_rank, place.master.port), (0, Some(4000)));
}

#[test]
fn flags_that_contradict_the_hostfile_are_refused() {
    let here = "localhost slots=2\n";
    let many = Args {
        nproc: Some(3),
        ..Args::default()
    };
    for (text, args, vars, words) in [
        (
            here,
            &many,
            &[][..],
            "--nproc 3 is more than the 2 slots of localhost",
        ),
        (
            "192.0.2.9\n",
            &Args::default(),
            &[],
            "does not name this machine",
        ),
        (
            here,
            &Args::default(),
            &[("NNODES", "3"), ("NODE_RANK", "0")],
            "has 1 machines",
        ),
        (
            here,
            &Args::default(),
            &[("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")],
            "contradict",
        ),
    ] {
        let failure = placed(text, args, vars).0.expect_err(words);
        assert_eq!(failure.code.status(), 2);
        assert!(failure.title.contains(words), "{failure}");
    }
    let failure = placed("192.0.2.9\n", &Args::default(), &[])
        .0
        .expect_err("elsewhere");
    assert!(
        failure
            .next
            .iter()
            .any(|line| line.contains("on 192.0.2.9: launcher")),
        "{failure}"
    );
}

#[test]
fn a_missing_hostfile_runs_on_this_machine_and_says_so() {
    let args = Args {
        hostfile: Some(PathBuf::from("/no/such/hostfile")),
        ..Args::default()
    };
    let env = Env::from_lookup(&|_| None).expect("reads");
    let mut shown = Vec::new();
    let place = |args: &Args, shown: &mut Vec<Event>| {
        place(args, &[], &env, &mut |event| shown.push(event))
    };
    assert_eq!(place(&args, &mut shown), Ok(None));
    assert!(matches!(&shown[..], [Event::Warning { text }] if text.contains("/no/such/hostfile")));
    let args = Args {
        include: Some("a".into()),
        ..args
    };
    place(&args, &mut shown).expect_err("nothing to choose from");
}

#[test]
fn host_names_match_with_and_without_domain() {
    for (a, b, same) in [
        ("gpu01", "gpu01", true),
        ("GPU01", "gpu01.cluster", true),
        ("gpu01.a", "gpu01.b", false),
        ("gpu01", "gpu02", false),
        ("10.0.0.1", "10", false),
    ] {
        assert_eq!(same_name(a, b), same, "{a} {b}");
    }
}

proptest! {
    #[test]
    fn any_text_is_read_or_refused(text in r"([a-c.:=#@ \n,]|slots=|[0-9]){0,60}", choice in "[a-c:@,0-9]{0,12}") {
        if let Ok(hosts) = read(&text) {
            prop_assert!(!hosts.is_empty());
            if let Ok(left) = choose(hosts.clone(), Some(&choice), None) {
                prop_assert!(left.iter().all(|host| !host.slots.is_empty()));
            }
            choose(hosts, None, Some(&choice)).ok();
        }
    }
}
