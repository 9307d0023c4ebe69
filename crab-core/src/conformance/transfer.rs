//! Rules for what backends offer beyond saving and bringing back: differences, space, streams. A backend that does not
//! offer one of them says so with a typed error.

use std::collections::{BTreeMap, VecDeque};
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;

use async_trait::async_trait;
use rustix::fs::XattrFlags;

use super::{BackendFixture, artifact_name, checkpoint, kill_and_restore, listed, name, operation, start_if_files};
use super::{trees, try_restore};
use crate::{
    Artifact, ArtifactId, ByteStream, ErrorKind, ExportRequest, FileChangeKind, ImportRequest, Result, ResumeToken,
    SandboxId,
};

fn unsupported<T>(result: Result<T>) {
    assert_eq!(result.err().expect("it is not offered").kind(), ErrorKind::Unsupported);
}

async fn diff(f: &dyn BackendFixture, from: &Artifact, to: &Artifact) -> BTreeMap<Vec<u8>, FileChangeKind> {
    let mut changes = f.backend().diff(from, to).await.expect("diff");
    let mut found = BTreeMap::new();
    while let Some(change) = changes.next().await.expect("the next change") {
        assert!(!change.path.starts_with(b"/") && !change.path.ends_with(b"/"), "{change:?}");
        let twice = found.insert(change.path.clone(), change.kind);
        assert_eq!(twice, None, "{change:?} was named twice");
    }
    found
}

/// A diff names what a walk over both trees finds: nothing between equal states, and each way round.
pub async fn a_diff_names_exactly_what_differs(f: &dyn BackendFixture) {
    let id = f.sandbox().await;
    let mut versions = Vec::new();
    for value in [1, 1000, 1] {
        f.set(&id, value).await;
        versions.push(checkpoint(f, &id).await);
    }
    if !f.backend().capabilities().diffs {
        return unsupported(f.backend().diff(&versions[0], &versions[1]).await);
    }
    for from in &versions {
        for to in &versions {
            let found = diff(f, from, to).await;
            assert!(from.id != to.id || found.is_empty(), "a state differs from itself: {found:?}");
            if let (Some(a), Some(b)) = (f.backend().tree(from), f.backend().tree(to))
                && a.exists()
                && b.exists()
            {
                assert_eq!(found, trees::differences(&a, &b));
            }
        }
    }
    let there = diff(f, &versions[0], &versions[1]).await;
    let back = diff(f, &versions[1], &versions[0]).await;
    assert!(!there.is_empty());
    assert!(there.keys().eq(back.keys()), "{there:?} and back {back:?}");
    let missing = Artifact { id: artifact_name(), ..versions[0].clone() };
    let error = f.backend().diff(&versions[0], &missing).await.err().expect("one is missing");
    assert_eq!(error.kind(), ErrorKind::NotFound);
}

/// A change of mode, owner or attributes alone is told, of a file's as of the root directory's own. For fixtures whose
/// sandboxes have roots on a disk.
pub async fn a_diff_tells_changes_of_metadata_alone(f: &dyn BackendFixture) {
    let id = f.sandbox().await;
    let root = f.host().describe(&id).await.expect("the host describes its own sandbox").root;
    if !f.backend().capabilities().diffs || !root.is_dir() {
        return;
    }
    fs::write(root.join("file"), "").unwrap();
    type Act = fn(&Path) -> io::Result<()>;
    let acts: [(&str, Act); 3] = [
        ("mode", |path| fs::set_permissions(path, Permissions::from_mode(0o710))),
        ("owner", |path| chown(path, Some(7), Some(8))),
        ("attribute", |path| Ok(rustix::fs::setxattr(path, "user.crab", &[1; 700], XattrFlags::empty())?)),
    ];
    let mut before = checkpoint(f, &id).await;
    for (what, act) in acts {
        act(&root).expect(what);
        act(&root.join("file")).expect(what);
        let after = checkpoint(f, &id).await;
        let expected = [&b""[..], b"file"].map(|path| (path.to_vec(), FileChangeKind::Metadata)).into();
        assert_eq!(diff(f, &before, &after).await, expected, "{what}");
        assert_eq!(diff(f, &after, &before).await, expected, "{what}");
        before = after;
    }
}

/// Space is told, and no more is exclusive than there is.
pub async fn space_is_accounted(f: &dyn BackendFixture) {
    let id = f.sandbox().await;
    f.set(&id, 1).await;
    let artifact = checkpoint(f, &id).await;
    if !f.backend().capabilities().accounts {
        return unsupported(f.backend().space(&artifact).await);
    }
    let space = f.backend().space(&artifact).await.expect("space");
    assert!(space.exclusive <= space.referenced, "{space:?}");
    f.backend().remove(&artifact).await.expect("remove");
    assert_eq!(f.backend().space(&artifact).await.unwrap_err().kind(), ErrorKind::NotFound);
}

/// A stream that is all there already.
struct Pieces(VecDeque<Vec<u8>>);

#[async_trait]
impl ByteStream for Pieces {
    async fn next(&mut self) -> Result<Option<Vec<u8>>> {
        Ok(self.0.pop_front())
    }
}

async fn exported(f: &dyn BackendFixture, request: ExportRequest<'_>) -> Vec<u8> {
    let mut stream = f.backend().export(request).await.expect("export");
    let mut bytes = Vec::new();
    while let Some(piece) = stream.next().await.expect("the next piece") {
        assert!(!piece.is_empty());
        bytes.extend(piece);
    }
    bytes
}

/// Imports a stream that arrives in pieces of another size than it was given in.
async fn import(
    f: &dyn BackendFixture,
    sandbox: &SandboxId,
    artifact: ArtifactId,
    base: Option<&Artifact>,
    bytes: &[u8],
) -> Result<Artifact> {
    let mut stream = Pieces(bytes.chunks(7001).map(<[u8]>::to_vec).collect());
    f.backend().import(ImportRequest { sandbox, artifact, base, stream: &mut stream }).await
}

/// What was exported can be imported as another sandbox's artifact, in full or on top of a base, and restored.
pub async fn an_export_can_be_imported_elsewhere(f: &dyn BackendFixture) {
    let id = f.sandbox().await;
    f.set(&id, 1).await;
    let one = checkpoint(f, &id).await;
    if !f.backend().capabilities().exports {
        unsupported(f.backend().export(ExportRequest::full(&one)).await);
        return unsupported(import(f, &id, artifact_name(), None, b"").await);
    }
    f.set(&id, 2).await;
    let two = checkpoint(f, &id).await;
    let (full, since) =
        (exported(f, ExportRequest::full(&one)).await, exported(f, ExportRequest::since(&one, &two)).await);
    // Where the files can be read: an import need not be mounted, and a tree in memory is none.
    let inodes =
        |artifact: &Artifact| f.backend().tree(artifact).filter(|tree| tree.exists()).map(|tree| trees::inodes(&tree));
    let had = inodes(&two);
    // The originals are not needed any more.
    f.set(&id, 3).await;
    f.backend().remove(&one).await.expect("remove");
    f.backend().remove(&two).await.expect("remove");

    let other = SandboxId::new(name("elsewhere")).unwrap();
    let first = import(f, &other, artifact_name(), None, &full).await.expect("import in full");
    let second = import(f, &other, artifact_name(), Some(&first), &since).await.expect("import on top");
    assert_eq!((&first.sandbox, first.domain), (&other, f.backend().domain()));
    let mut expected = [first.id.clone(), second.id.clone()];
    expected.sort();
    assert_eq!(listed(f, &other).await, expected);
    if let (Some(has), Some(had)) = (inodes(&second), had) {
        assert_eq!(has, had, "processes remember the inode numbers of their files");
    }
    for (artifact, value) in [(&second, 2), (&first, 1), (&second, 2)] {
        f.backend().verify(artifact).await.expect("an import is whole");
        kill_and_restore(f, &id, artifact).await;
        assert_eq!(f.get(&id).await, Some(value));
    }
    // And on from there.
    let again = exported(f, ExportRequest::since(&first, &second)).await;
    let third = SandboxId::new(name("third")).unwrap();
    let base = import(f, &third, artifact_name(), None, &exported(f, ExportRequest::full(&first)).await).await;
    let top = import(f, &third, artifact_name(), Some(&base.expect("the base")), &again).await.expect("the second hop");
    kill_and_restore(f, &id, &top).await;
    assert_eq!(f.get(&id).await, Some(2));
}

/// Damaged, cut-short and misplaced streams are refused, and leave nothing.
pub async fn a_bad_import_leaves_nothing(f: &dyn BackendFixture) {
    if !f.backend().capabilities().exports {
        return;
    }
    let id = f.sandbox().await;
    f.set(&id, 1).await;
    let one = checkpoint(f, &id).await;
    f.set(&id, 2).await;
    let two = checkpoint(f, &id).await;
    let (full, since) =
        (exported(f, ExportRequest::full(&one)).await, exported(f, ExportRequest::since(&one, &two)).await);
    let other = SandboxId::new(name("elsewhere")).unwrap();
    let artifact = artifact_name();
    let expect = async |base: Option<&Artifact>, bytes: &[u8], kind: ErrorKind, what: &str| {
        let error = import(f, &other, artifact.clone(), base, bytes).await.expect_err(what);
        assert_eq!(error.kind(), kind, "{what}: {error}");
        assert!(listed(f, &other).await.is_empty(), "{what}");
        // Where it can be continued, it is given up for good.
        f.backend().remove(&Artifact { id: artifact.clone(), sandbox: other.clone(), ..one.clone() }).await.unwrap();
    };
    expect(None, b"", ErrorKind::Corrupt, "nothing at all").await;
    expect(None, b"what is this", ErrorKind::Corrupt, "something else").await;
    for cut in [full.len() / 3, full.len() - 1] {
        expect(None, &full[..cut], ErrorKind::Corrupt, "cut short").await;
    }
    for part in 1..8 {
        let mut damaged = full.clone();
        damaged[full.len() * part / 8] ^= 0x10;
        expect(None, &damaged, ErrorKind::Corrupt, "a flipped bit").await;
    }
    expect(None, &[&full[..], b"more"].concat(), ErrorKind::Corrupt, "more than there is").await;
    expect(None, &since, ErrorKind::InvalidInput, "without its base").await;
    expect(Some(&two), &since, ErrorKind::InvalidInput, "on another base").await;

    let error = import(f, &id, one.id.clone(), None, &full).await.expect_err("the name is taken");
    assert_eq!(error.kind(), ErrorKind::AlreadyExists);
    f.backend().verify(&one).await.expect("what has the name is whole");
    import(f, &other, artifact, None, &full).await.expect("the name is free after all that");
}

/// After a cut anywhere the import is continued where the backend tells from where, and else begun anew; what came
/// through earlier is in the way of neither.
pub async fn an_import_that_was_cut_short_goes_on_or_begins_anew(f: &dyn BackendFixture) {
    if !f.backend().capabilities().exports {
        return;
    }
    let id = f.sandbox().await;
    f.set(&id, 1).await;
    let one = checkpoint(f, &id).await;
    f.set(&id, 2).await;
    let two = checkpoint(f, &id).await;
    let other = SandboxId::new(name("elsewhere")).unwrap();
    let first = import(f, &other, artifact_name(), None, &exported(f, ExportRequest::full(&one)).await).await.unwrap();
    for (base, has) in [(None, None), (Some(&one), Some(&first))] {
        let request = ExportRequest { artifact: &two, base, resume: None };
        let all = exported(f, request).await;
        for (cut, goes_on) in [(all.len() / 2, false), (all.len() - 1, true)] {
            let artifact = artifact_name();
            import(f, &other, artifact.clone(), has, &all[..cut]).await.expect_err("it was cut short");
            let token = f.backend().resume_token(&other, &artifact).await.expect("that can be told");
            assert!(token.is_none() || f.backend().capabilities().resumes);
            let resume = token.as_ref().filter(|_| goes_on);
            let rest = exported(f, ExportRequest { resume, ..request }).await;
            let whole = import(f, &other, artifact.clone(), has, &rest).await.expect("the second attempt");
            assert_eq!(f.backend().resume_token(&other, &artifact).await.expect("that can be told"), None);
            kill_and_restore(f, &id, &whole).await;
            assert_eq!(f.get(&id).await, Some(2));
            f.backend().remove(&whole).await.expect("remove");
        }
    }
    let resume = Some(&ResumeToken("something else".to_owned()));
    let error = f.backend().export(ExportRequest { resume, ..ExportRequest::full(&one) }).await.err().expect("refused");
    assert!(matches!(error.kind(), ErrorKind::InvalidInput | ErrorKind::Unsupported), "{error}");
}

/// A restore into a sandbox that never had a root makes it.
pub async fn a_fork_makes_a_root_where_there_is_none(f: &dyn BackendFixture) {
    let id = f.sandbox().await;
    f.set(&id, 1).await;
    let artifact = checkpoint(f, &id).await;
    f.set(&id, 2).await;
    if !f.backend().capabilities().forks {
        return;
    }
    let Some(fork) = f.rootless_target(&id).await else { return };
    try_restore(f, &fork, &artifact, &operation(), None).await.expect("restore into the fork");
    start_if_files(f, &fork).await;
    assert_eq!((f.get(&fork).await, f.get(&id).await), (Some(1), Some(2)));
    // A fork of the fork, without the one in between.
    f.set(&fork, 3).await;
    let of_fork = checkpoint(f, &fork).await;
    f.backend().remove(&artifact).await.expect("an older state never blocks");
    let Some(second) = f.rootless_target(&fork).await else { return };
    try_restore(f, &second, &of_fork, &operation(), None).await.expect("fork the fork");
    start_if_files(f, &second).await;
    f.backend().remove(&of_fork).await.expect("nor does what a fork came from");
    assert_eq!((f.get(&second).await, f.get(&fork).await, f.get(&id).await), (Some(3), Some(3), Some(2)));
}
