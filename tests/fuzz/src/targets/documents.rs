//! Environments, references, access profiles and signatures.

use crate::Target;
use crate::seal::{sealed, unsealed};
use layer::environment::{Environment, RunConfig};
use layer::profile::{Profile, Run, Touch};
use layer::reference::{Reference, ReferenceEntry, Target as Named};
use layer::signature::{DOMAIN, Signature, Statement};
use layer::{EnvId, KeyId, LayerId, SignatureBytes};
use std::collections::BTreeMap;

/// An environment document.
pub const ENVIRONMENT: Target = Target {
    name: "environment",
    run: |data| {
        if let Ok(environment) = Environment::decode(data) {
            assert_eq!(environment.canonical(), data, "only the canonical form is taken");
        }
    },
    seeds: || {
        let config = RunConfig {
            env: vec!["PATH=/bin".to_owned(), "A=b\u{e9}".to_owned()],
            cwd: "/work".to_owned(),
            user: "1000:1000".to_owned(),
            cmd: vec!["sh".to_owned(), "-c".to_owned(), "true".to_owned()],
            ..RunConfig::default()
        };
        let layers = vec![LayerId([1; 32]), LayerId([2; 32])];
        [
            Environment::new(layers, config),
            Environment::new(vec![LayerId([3; 32])], RunConfig::default()),
        ]
        .into_iter()
        .flatten()
        .map(|environment| environment.canonical())
        .collect()
    },
};

/// A reference's text, and the entry that says where it points.
pub const REFERENCE: Target = Target {
    name: "reference",
    run: |data| {
        if let Ok(entry) = ReferenceEntry::decode(data) {
            assert_eq!(ReferenceEntry::decode(&entry.encode()).ok(), Some(entry));
        }
        let text = String::from_utf8_lossy(data);
        if let Ok(reference) = text.parse::<Reference>() {
            assert_eq!(reference.to_string().parse().ok(), Some(reference.clone()));
            let parts = reference.name().split('/').chain([reference.tag()]);
            for part in parts {
                assert!(!matches!(part, "" | "." | ".."), "{reference} becomes a path");
            }
        }
    },
    seeds: || {
        let entry = |target| ReferenceEntry {
            number: 7,
            target,
            time_unix_ns: 1_700_000_000_000_000_000,
            author: "someone".to_owned(),
            nonce: "0123456789abcdef".to_owned(),
        };
        vec![
            entry(Some(Named::Layer(LayerId([1; 32])))).encode(),
            entry(Some(Named::Environment(EnvId([2; 32])))).encode(),
            entry(None).encode(),
            b"env/python/numpy:2.1".to_vec(),
            b"base/debian".to_vec(),
        ]
    },
};

/// An access profile.
pub const PROFILE: Target = Target {
    name: "profile",
    run: |data| {
        if let Ok(profile) = Profile::decode(&sealed(data)) {
            assert_eq!(Profile::decode(&profile.encode()).ok().as_ref(), Some(&profile));
            let touches: usize = profile.runs().iter().map(|run| run.touches().len()).sum();
            // Each touch has two borders, and steps lie between borders.
            assert!(profile.order().len() < 2 * touches.max(1));
            assert_eq!(profile.merged(&profile), profile, "merging with itself adds nothing");
        }
    },
    seeds: || {
        let touch = |layer, start_block, at_ms| Touch { layer, start_block, blocks: 8, at_ms };
        let run =
            |start, touches| Run::new(start, vec![LayerId([1; 32]), LayerId([2; 32])], touches);
        let runs = [
            run(5, vec![touch(0, 3, 0), touch(1, 9, 2), touch(0, 40, 2)]),
            run(9, vec![touch(1, 9, 1), touch(0, 70_000, 900)]),
        ];
        let runs: Vec<Run> = runs.into_iter().flatten().collect();
        vec![
            unsealed(Profile::new(runs[..1].to_vec()).encode()),
            unsealed(Profile::new(runs).encode()),
        ]
    },
};

/// A signature, and a file of public keys.
pub const SIGNATURE: Target = Target {
    name: "signature",
    run: |data| {
        if let Ok(signature) = Signature::decode(data) {
            assert_eq!(signature.encode(), data, "only the canonical form is taken");
            let message = signature.statement.message();
            assert!(message.starts_with(DOMAIN) && message.len() < DOMAIN.len() + data.len());
        }
        let text = String::from_utf8_lossy(data);
        for key in store::public_keys(&text).into_iter().flatten() {
            let again = store::public_keys(&store::public_pem(&key));
            assert_eq!(again.ok().as_deref(), Some(&[key][..]));
        }
    },
    seeds: || {
        let claims = BTreeMap::from([("commit".to_owned(), "b\u{e9}".to_owned())]);
        let subjects = [Named::Layer(LayerId([1; 32])), Named::Environment(EnvId([2; 32]))];
        let statements =
            subjects.map(|subject| Statement::new(subject, KeyId([3; 32]), 7, claims.clone()));
        let signatures = statements.into_iter().flatten();
        let mut seeds: Vec<Vec<u8>> = signatures
            .map(|statement| statement.signed(SignatureBytes([4; 64])).encode())
            .collect();
        let keys = [KeyId([5; 32]), KeyId([6; 32])].map(|key| store::public_pem(&key));
        seeds.push(keys.join("for people\n").into_bytes());
        seeds
    },
};
