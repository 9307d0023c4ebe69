//! The documents of the repository.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};

fn documents(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let entry = entry.unwrap();
        let (name, kind) = (entry.file_name(), entry.file_type().unwrap());
        if kind.is_dir() && name != "target" && !name.as_encoded_bytes().starts_with(b".") {
            documents(&entry.path(), found);
        } else if kind.is_file() && entry.path().extension().is_some_and(|extension| extension == "md") {
            found.push(entry.path());
        }
    }
}

/// The targets of `[text](target)` that name files.
fn links(text: &str) -> impl Iterator<Item = &str> {
    text.split("](").skip(1).filter_map(|rest| {
        let target = rest.split(')').next()?.split('#').next()?;
        (!target.is_empty() && !target.contains("://")).then_some(target)
    })
}

#[test]
fn every_link_to_a_file_leads_to_one() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut found = Vec::new();
    documents(root, &mut found);
    assert!(found.contains(&root.join("README.md")));
    let broken = found.iter().flat_map(|document| {
        let text = std::fs::read_to_string(document).unwrap();
        let beside = document.parent().unwrap().to_owned();
        let broken = links(&text).filter(|target| !beside.join(target).exists()).map(str::to_owned).collect::<Vec<_>>();
        broken.into_iter().map(|target| format!("{}: {target}", document.display()))
    });
    assert_eq!(broken.collect::<Vec<_>>(), Vec::<String>::new());
}

#[test]
fn links_are_told_from_other_text() {
    let text = "[a](b.md#part), [web](https://example.org/x.md), [here](#part), (no) [link], [two](c/d.rs)";
    assert_eq!(links(text).collect::<Vec<_>>(), ["b.md", "c/d.rs"]);
}
