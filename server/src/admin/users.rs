//! Users, as SDKs' user managers ask for them.
//!
//! There are two kinds, and each is a role that other servers know too: an administrator may do everything, the others
//! read and write all data. Roles that are finer than that are refused: whoever asks for one would get more than they
//! were told.

use std::collections::HashMap;
use std::sync::Arc;

use axum::extract::{Form, Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use frontend::auth::{Identity, Role};
use serde_json::{Value, json};

use super::buckets::{forbidden, refused};
use super::{Context, Shared};

/// Our roles by the names of others, and what each is.
const ROLES: [(&str, Role, &str); 2] = [
    ("admin", Role::Admin, "Everything, buckets and users included"),
    ("bucket_full_access", Role::Data, "All data of all buckets"),
];

pub fn routes() -> Router<Arc<Context>> {
    Router::new()
        .route("/whoami", get(whoami))
        .route("/settings/rbac/roles", get(roles))
        .route("/settings/rbac/groups", get(async || Json(json!([]))))
        .route("/settings/rbac/users", get(list))
        .route("/settings/rbac/users/local", get(list))
        .route("/settings/rbac/users/external", get(async || Json(json!([]))))
        .route("/settings/rbac/users/local/{user}", get(show).put(put).delete(delete))
        .route("/controller/changePassword", post(change_password))
}

async fn whoami(Extension(who): Extension<Identity>) -> Json<Value> {
    Json(describe(&who.user, who.role))
}

async fn roles() -> Json<Value> {
    let shown = ROLES.iter().map(|(name, role, what)| {
        let mut shown = described_role(*role);
        shown["name"] = json!(name);
        shown["desc"] = json!(what);
        shown
    });
    Json(shown.collect())
}

async fn list(State(context): Shared, Extension(who): Extension<Identity>) -> Response {
    if who.role != Role::Admin {
        return forbidden();
    }
    let users = context.users.list();
    Json(users.iter().map(|(name, role)| describe(name, *role)).collect::<Value>()).into_response()
}

async fn show(State(context): Shared, Extension(who): Extension<Identity>, Path(name): Path<String>) -> Response {
    if who.role != Role::Admin {
        return forbidden();
    }
    match role_of(&context, &name) {
        Some(role) => Json(describe(&name, role)).into_response(),
        None => unknown(),
    }
}

/// Makes a user or changes one. Without a password, an existing user's stays.
async fn put(
    State(context): Shared,
    Extension(who): Extension<Identity>,
    Path(name): Path<String>,
    Form(form): Form<HashMap<String, String>>,
) -> Response {
    if who.role != Role::Admin {
        return forbidden();
    }
    if form.get("groups").is_some_and(|groups| !groups.is_empty()) {
        return refused("groups", "there are no groups of users");
    }
    let role = match role_named(form.get("roles").map_or("", String::as_str)) {
        Ok(role) => role,
        Err(why) => return refused("roles", &why),
    };
    match form.get("password") {
        Some(password) => set(context, name, password.clone(), role).await,
        None if role_of(&context, &name) == Some(role) => StatusCode::OK.into_response(),
        None => refused("password", "a new user, or a new role, needs the password with it"),
    }
}

async fn delete(State(context): Shared, Extension(who): Extension<Identity>, Path(name): Path<String>) -> Response {
    if who.role != Role::Admin {
        return forbidden();
    }
    if *who.user == *name {
        return refused("_", "nobody removes themselves");
    }
    if !context.users.remove(&name) {
        return unknown();
    }
    saved(&context)
}

async fn change_password(
    State(context): Shared,
    Extension(who): Extension<Identity>,
    Form(form): Form<HashMap<String, String>>,
) -> Response {
    match form.get("password") {
        Some(password) => set(context, who.user.to_string(), password.clone(), who.role).await,
        None => refused("password", "is missing"),
    }
}

/// Making the keys of a password takes long, on purpose, and the port has one thread.
async fn set(context: Arc<Context>, name: String, password: String, role: Role) -> Response {
    if password.is_empty() {
        return refused("password", "is empty");
    }
    let done = tokio::task::spawn_blocking(move || match context.users.set(&name, &password, role) {
        Ok(()) => saved(&context),
        Err(error) => refused("name", &error.to_string()),
    });
    done.await.unwrap_or_else(|_| StatusCode::INTERNAL_SERVER_ERROR.into_response())
}

fn saved(context: &Context) -> Response {
    match context.users.save() {
        Ok(()) => StatusCode::OK.into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

fn role_of(context: &Context, name: &str) -> Option<Role> {
    context.users.list().into_iter().find(|(user, _)| **user == *name).map(|(_, role)| role)
}

fn role_named(asked: &str) -> Result<Role, String> {
    match asked {
        "admin" => Ok(Role::Admin),
        "bucket_full_access[*]" => Ok(Role::Data),
        _ => Err(format!("{asked:?} is not supported, only admin or bucket_full_access[*]")),
    }
}

fn describe(name: &str, role: Role) -> Value {
    json!({ "id": name, "domain": "local", "name": "", "groups": [], "external_groups": [], "roles": [described_role(role)] })
}

fn described_role(role: Role) -> Value {
    let name = ROLES.iter().find(|(_, ours, _)| *ours == role).map(|(name, ..)| name);
    match role {
        Role::Admin => json!({ "role": name }),
        Role::Data => json!({ "role": name, "bucket_name": "*" }),
    }
}

fn unknown() -> Response {
    (StatusCode::NOT_FOUND, Json(json!("Unknown user."))).into_response()
}
